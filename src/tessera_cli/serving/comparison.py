"""Two results of a benchmark beside each other: ratios, and how sure they are.

The interval of a ratio is a percentile bootstrap over repeats (Efron & Tibshirani, An Introduction to the
Bootstrap, 1993, ch. 13): both sides' repeats are drawn anew with replacement, and the ratio of their means is
taken each time. Requests of one repeat share an engine and a queue, so they are no independent draws, and a
single repeat says nothing of how the next would go.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from tessera_cli.errors import DataError
from tessera_cli.serving.load_result import METRICS

CONFIDENCE = 0.95
NUM_RESAMPLES = 10_000
RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
FIGURES = (*RATES, *(f"{statistic}_{metric}_ms" for metric in METRICS for statistic in ("mean", "p99")))
_WORKLOAD = ("request_rate", "burstiness", "max_concurrency")

_Figure = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_FIGURES: TypeAdapter[dict[str, float | None]] = TypeAdapter(dict[str, _Figure | None])


class _Measured(BaseModel):
    output_throughput: _Figure
    failed: int | None = None


class _Run(_Measured):
    """What has to be right about a run before its figures mean anything."""

    repeats: list[_Measured] = []
    config: dict[str, Any] = {}
    max_concurrency: int | None = None


@dataclass(frozen=True)
class ComparedFigure:
    """One figure of both sides, each the mean of its repeats; `interval` is of the ratio, after/before."""

    name: str
    before: float
    after: float
    ratio: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class ComparedRuns:
    """One load on both sides; `same_output` is None where a side has kept no digest of its answers."""

    max_concurrency: int | None
    num_repeats: tuple[int, int]
    same_output: bool | None
    figures: list[ComparedFigure]

    @property
    def throughput_ratio(self) -> float:
        return next(one.ratio for one in self.figures if one.name == "output_throughput")


def read_results(path: Path) -> list[dict[str, Any]]:
    """The runs of a file that `tessera bench` or vLLM's `bench serve` wrote.

    Raises:
        DataError: the file is no such result, or requests failed in it.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    runs = document.get("results", [document]) if isinstance(document, dict) else None
    if not isinstance(runs, list) or not runs:
        raise DataError(f"{path} is no benchmark result", hint="write one with `tessera bench -o FILE.json`")
    for run in runs:
        _check(run, path)
    return runs


def _check(run: Any, path: Path) -> None:
    try:
        known = _Run.model_validate(run, strict=True)
        for one in [run, *run.get("repeats", [])]:
            _FIGURES.validate_python({name: one.get(name) for name in FIGURES}, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        problem = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        raise DataError(
            f"{path}: {f'`{place}`: ' if place else ''}{problem}", hint="is it a benchmark's result?"
        ) from error
    sides = [known, *known.repeats]
    failed = sum(one.failed or 0 for one in sides)
    if failed:
        raise DataError(f"{path}: {failed} requests failed, so its figures are of less work")
    if any(one.output_throughput == 0 for one in sides):
        raise DataError(f"{path}: a run without output, so nothing is a share of it")


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """In what two runs asked for different work, in words; empty where it was the same."""
    found = [
        f"{name} {before.get(name)} and {after.get(name)}"
        for name in _WORKLOAD
        if before.get(name) != after.get(name)
    ]
    configs = before.get("config", {}), after.get("config", {})
    digests = [config.get("prompts_sha256") for config in configs]
    if None in digests:
        found.append("a side that does not say what was asked")
    elif digests[0] != digests[1]:
        names = [
            f"{name} {configs[0].get(name)} and {configs[1].get(name)}"
            for name in ("dataset", "num_prompts", "input_len", "output_len", "prefix_len", "n", "seed")
            if configs[0].get(name) != configs[1].get(name)
        ]
        found += names or ["other prompts or sampling"]
    return found


def compare_runs(before: dict[str, Any], after: dict[str, Any]) -> ComparedRuns:
    """All figures that both sides have."""
    sides = before.get("repeats") or [before], after.get("repeats") or [after]
    figures = []
    for name in FIGURES:
        values = [[repeat.get(name) for repeat in side] for side in sides]
        if any(value is None or value <= 0 for side in values for value in side):
            continue
        old, new = (float(np.mean(side)) for side in values)
        figures.append(ComparedFigure(name, old, new, new / old, ratio_interval(*values)))
    digests = before.get("output_sha256"), after.get("output_sha256")
    return ComparedRuns(
        max_concurrency=before.get("max_concurrency"),
        num_repeats=(len(sides[0]), len(sides[1])),
        same_output=None if None in digests else digests[0] == digests[1],
        figures=figures,
    )


def ratio_interval(
    before: Sequence[float], after: Sequence[float], *, seed: int = 0
) -> tuple[float, float] | None:
    """The CONFIDENCE interval of mean(after) / mean(before); None where a side has a single value."""
    if min(len(before), len(after)) < 2:
        return None
    generator = np.random.default_rng(seed)

    def means(values: Sequence[float]) -> Any:
        drawn = generator.integers(0, len(values), (NUM_RESAMPLES, len(values)))
        return np.asarray(values, dtype=float)[drawn].mean(axis=1)

    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means(after) / means(before), [tail, 100 - tail])
    return float(low), float(high)
