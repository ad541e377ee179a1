"""Drawings of a run: one PNG beside report.md, and SVGs that are part of report.html."""

import io
from collections.abc import Callable, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tessera_cli.distill.events import Evaluated, TrainStep

# Both stand out on white and on black; the page colours the text itself.
TRAIN_COLOR, HELD_OUT_COLOR, AXIS_COLOR = "#6b93c9", "#d1495b", "#888888"

Curve = tuple[Sequence[float], Sequence[float]]


def draw_curve(train_steps: Sequence[TrainStep], evaluations: Sequence[Evaluated]) -> bytes:
    """The training loss and the held-out KL over the tokens trained on, as a PNG."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(*_of_steps(train_steps, lambda step: step.loss), color="#9db4cf", label="training loss")
    held_out = _of_evaluations(train_steps, evaluations, lambda evaluation: evaluation.kl)
    axes.plot(*held_out, color="#b3382c", marker="o", label="held-out KL(teacher ‖ student)")
    _dress(axes, "nats per supervised token")
    axes.set_ylim(bottom=0)
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def svg_curves(train_steps: Sequence[TrainStep], evaluations: Sequence[Evaluated]) -> dict[str, str]:
    """Loss, held-out KL, agreement and acceptance, and throughput, by their titles, as `<svg>` elements."""
    held_out = [
        _of_evaluations(train_steps, evaluations, figure)
        for figure in (lambda e: e.kl, lambda e: 100 * e.top1_agreement, lambda e: 100 * e.acceptance)
    ]
    loss = _of_steps(train_steps, lambda step: step.loss)
    speed = _of_steps(train_steps, lambda step: step.tokens_per_second)
    return {
        "Training loss": _svg("loss", "nats/token", {"": (loss, TRAIN_COLOR)}),
        "Held-out KL(teacher ‖ student)": _svg("kl", "nats/token", {"": (held_out[0], HELD_OUT_COLOR)}),
        "Top-1 agreement and acceptance, held out": _svg(
            "agreement",
            "%",
            {"top-1 agreement": (held_out[1], HELD_OUT_COLOR), "acceptance": (held_out[2], TRAIN_COLOR)},
        ),
        "Throughput": _svg("speed", "tokens/s", {"": (speed, TRAIN_COLOR)}),
    }


def _svg(name: str, unit: str, curves: dict[str, tuple[Curve, str]]) -> str:
    figure = Figure(figsize=(5.5, 3), layout="constrained")
    axes = figure.subplots()
    for label, ((x, y), color) in curves.items():
        few = "o" if len(x) <= 40 else None
        axes.plot(x, y, color=color, linewidth=1.5, marker=few, markersize=3, label=label)
    _dress(axes, unit)
    axes.set_ylim(bottom=0)
    axes.tick_params(color=AXIS_COLOR)
    for spine in axes.spines.values():
        spine.set_color(AXIS_COLOR)
    if len(curves) > 1:
        axes.legend(frameon=False)
    svg = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    # A salt for each: ids of several drawings on one page must differ, and those of one always be the same.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
    text = svg.getvalue()
    return text[text.index("<svg") :]


def _dress(axes: Axes, unit: str) -> None:
    axes.set_xlabel("tokens through the student")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.grid(alpha=0.3)


def _of_steps(train_steps: Sequence[TrainStep], value: Callable[[TrainStep], float]) -> Curve:
    return [step.tokens for step in train_steps], [value(step) for step in train_steps]


def _of_evaluations(
    train_steps: Sequence[TrainStep], evaluations: Sequence[Evaluated], value: Callable[[Evaluated], float]
) -> Curve:
    tokens_at = {0: 0} | {step.step: step.tokens for step in train_steps}
    return [tokens_at[one.step] for one in evaluations], [value(one) for one in evaluations]
