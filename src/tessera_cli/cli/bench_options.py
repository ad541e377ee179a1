"""The options of `tessera bench` that are its own, and how their lists are read."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.cli.bench_report import BenchFormat
from tessera_cli.errors import UsageError
from tessera_cli.serving.workload import DEFAULT_CONCURRENCY


class Baseline(StrEnum):
    """What the engine is compared with."""

    NONE = "none"
    TRANSFORMERS = "transformers"


ConcurrencyOption = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        "--max-concurrency",
        metavar="N[,N...]",
        help="At most N requests in flight; a list measures one after the other. "
        "[default: 64; with --request-rate no limit]",
        show_default=False,
    ),
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="[default: 4 x concurrency, or all of --prompt-file]", show_default=False
    ),
]
InputLenOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Random prompt tokens of a request. [default: 128]", show_default=False
    ),
]
PrefixLenOption = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="Random tokens before them, the same in every request."),
]
OutputLenOption = Annotated[
    int, typer.Option(min=1, metavar="N", help="Tokens of an answer; end tokens are ignored.")
]
RangeRatioOption = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        help="Spread of both lengths: uniform within LEN x (1 +- RATIO). [default: 0]",
        show_default=False,
    ),
]
PromptFileOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|-",
        help="Prompts as for `generate`, instead of random ones; a line's own sampling fields hold.",
        show_default=False,
    ),
]
RequestRateOption = Annotated[
    float | None,
    typer.Option(
        metavar="RATE",
        help="Poisson arrivals per second. [default: as soon as --concurrency allows]",
        show_default=False,
    ),
]
NumWarmupsOption = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        help="Requests before the clock starts, never counted. [default: concurrency]",
        show_default=False,
    ),
]
RepeatOption = Annotated[
    int, typer.Option(min=1, metavar="N", help="Measure this often; the median run is shown.")
]
SeedOption = Annotated[int, typer.Option(min=0, metavar="N", help="Of prompts, lengths and arrivals.")]
BaselineOption = Annotated[
    Baseline, typer.Option(help="Run the same requests through this too and show the ratio.")
]
PercentilesOption = Annotated[str, typer.Option(metavar="P[,P...]", help="Of the latencies.")]
MaxTtftOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="MS", help="Exit status 3 if p99 TTFT is above.", show_default=False),
]
MinOutputThroughputOption = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="TOK/S", help="Exit status 3 if output throughput is below.", show_default=False
    ),
]
OutputFileOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the results there too: .json, .md, .csv or .txt.",
        show_default=False,
    ),
]


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
    if len(set(percents)) < len(percents):
        raise UsageError(f"--percentiles {text!r} has one twice", hint="such as 50,99")
    return percents


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
