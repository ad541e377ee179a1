"""How the values of `tessera bench` that are lists, bounds or files are read."""

from collections.abc import Sequence
from pathlib import Path

from tessera_cli.cli.bench_report import BenchFormat
from tessera_cli.errors import UsageError
from tessera_cli.serving.workload import DEFAULT_CONCURRENCY


def parse_concurrency(text: str | None, request_rate: float | None) -> list[int | None]:
    """The loads to measure, such as ``1,8,64``; None is no limit, the default with a request rate."""
    if text is None:
        return [DEFAULT_CONCURRENCY if request_rate is None else None]
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--concurrency {text!r} is not a list of numbers", hint="such as 1,8,64") from error
    if min(levels) < 1 or len(set(levels)) < len(levels):
        raise UsageError(f"--concurrency {text!r}: each number once, from 1", hint="such as 1,8,64")
    return list(levels)


def parse_percentiles(text: str) -> list[float]:
    """Percentiles such as ``50,90,99.9``."""
    try:
        percents = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--percentiles {text!r} is not a list of numbers", hint="such as 50,99") from error
    if not all(0 <= percent <= 100 for percent in percents):
        raise UsageError(f"--percentiles {text!r} has one outside 0 to 100", hint="such as 50,99")
    if any(float(f"{percent:g}") != percent for percent in percents):
        raise UsageError(
            f"--percentiles {text!r} has one of more than six digits", hint="its name would be another's"
        )
    if len(set(percents)) < len(percents):
        raise UsageError(f"--percentiles {text!r} has one twice", hint="such as 50,99")
    return percents


def parse_bounds(texts: list[str] | None, option: str, metrics: Sequence[str]) -> dict[str, float]:
    """Bounds in milliseconds from ``ttft:200`` or ``ttft:200,tpot:30``, repeated or not.

    Raises:
        UsageError: none of `metrics`, one given twice, or no positive number.
    """
    bounds: dict[str, float] = {}
    for part in (part for text in texts or () for part in text.replace(",", " ").split() or [text]):
        metric, _, number = part.partition(":")
        try:
            bound = float(number)
        except ValueError:
            bound = 0.0
        if metric not in metrics or metric in bounds or not 0 < bound < float("inf"):
            raise UsageError(
                f"{option} {part!r} is not a bound",
                hint=f"METRIC:MS, each of {', '.join(metrics)} at most once",
            )
        bounds[metric] = bound
    return bounds


def format_of(path: Path) -> BenchFormat:
    """The format that a result file's suffix means."""
    known = {
        ".json": BenchFormat.JSON,
        ".md": BenchFormat.MD,
        ".csv": BenchFormat.CSV,
        ".txt": BenchFormat.TABLE,
    }
    form = known.get(path.suffix.lower())
    if form is None:
        raise UsageError(f"{path}: the suffix says no format", hint="use " + ", ".join(known))
    return form
