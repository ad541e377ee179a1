"""How the figures of an evaluation are told, and the bounds that they may be held to."""

import math
from collections.abc import Mapping
from typing import Any

# The figures of an evaluation, by their name in `Evaluated`, and how they are told.
_FIGURES = {
    "kl": ("KL(teacher‖student), nats", "{:.4f}"),
    "top1_agreement": ("top-1 agreement", "{:.1%}"),
    "top5_agreement": ("top-5 agreement", "{:.1%}"),
    "acceptance": ("acceptance", "{:.1%}"),
    "cross_entropy": ("cross-entropy, nats", "{:.4f}"),
    "student_perplexity": ("perplexity", "{:.2f}"),
    "teacher_perplexity": ("the teacher's perplexity", "{:.2f}"),
    "num_tokens": ("tokens measured", "{:,}"),
}

# A bound by its option, the figure that it holds, and whether that may not be above or not below it.
GATES = {
    "max_kl": ("kl", "above"),
    "max_perplexity": ("student_perplexity", "above"),
    "min_agreement": ("top1_agreement", "below"),
    "min_agreement_5": ("top5_agreement", "below"),
    "min_acceptance": ("acceptance", "below"),
}


def evaluation_rows(figures: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each figure, with a column for each of `figures`."""
    return [
        (label, *(figure(column, name) for column in figures.values()))
        for name, (label, _) in _FIGURES.items()
    ]


def figure(figures: Mapping[str, Any], name: str) -> str:
    """One figure as it is told, or a dash where there is none."""
    return _FIGURES[name][1].format(_number(figures[name])) if name in figures else "-"


def speculative_line(speculative: Mapping[str, Any] | None) -> str:
    """What the student is worth as the teacher's draft model."""
    if speculative is None:
        return "speculative decoding: not measured, the models have too few positions to decode"
    cost = f"one student step costs {speculative['cost_ratio']:.2f} teacher steps"
    if not speculative["draft_length"]:
        return f"speculative decoding: no speed-up expected, {cost}"
    return (
        f"speculative decoding: {speculative['speedup']:.2f}× expected at draft length "
        f"{speculative['draft_length']}, {cost}"
    )


def task_rows(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[tuple[str, ...]]:
    """One row for each metric of each task; `results` holds task, metric, then model."""
    return [
        (task, metric, *(f"{value:.4f}" for value in values.values()))
        for task, metrics in results.items()
        for metric, values in metrics.items()
    ]


def missed_gates(student: Mapping[str, Any], bounds: Mapping[str, float | None]) -> list[str]:
    """The bounds, by their names in `GATES`, that the student misses, in words.

    A figure that is not a number misses its bound.
    """
    missed = []
    for name, bound in bounds.items():
        key, side = GATES[name]
        if bound is None:
            continue
        value = _number(student[key])
        holds = value <= bound if side == "above" else value >= bound
        if not holds:
            missed.append(f"{_FIGURES[key][0].split(',')[0]} is {value:.4f}, {side} {bound:g}")
    return missed


def _number(value: float | None) -> float:
    # As `event_values` has it for JSON.
    return math.inf if value is None else value
