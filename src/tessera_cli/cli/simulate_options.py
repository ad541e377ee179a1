"""The options of `tessera simulate` that are its own, and how its lists are read."""

from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.cli.bench_values import parse_bounds
from tessera_cli.serving.load_result import METRICS

GpuOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="h100-sxm, h200, a100-80g, l4 or rtx-4090: its roofline.", show_default=False
    ),
]
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="What `tessera bench --concurrency 1,8,64 --json` measured: its machine, its engine options.",
        show_default=False,
    ),
]
StepMsOption = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="MS",
        help="Cost of a step beside its tokens; with --gpu beside its arithmetic and reads. "
        "[default with --gpu: 3]",
        show_default=False,
    ),
]
TokenUsOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="US", help="Cost of a scheduled token, with --step-ms.", show_default=False),
]
KvTokenNsOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="NS", help="Cost of a cached token that is read.", show_default=False),
]
ComputeEfficiencyOption = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE", help="Of the GPU's arithmetic that is reached. [default: 0.5]", show_default=False
    ),
]
MemoryEfficiencyOption = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE", help="Of the GPU's bandwidth that is reached. [default: 0.7]", show_default=False
    ),
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="[default: 4 x concurrency; 1000 with a rate]", show_default=False),
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option(
        "--concurrency",
        "--max-concurrency",
        min=1,
        metavar="N",
        help="At most N requests in flight. [default: 64; with a rate no limit]",
        show_default=False,
    ),
]
InputLenOption = Annotated[int, typer.Option(min=1, metavar="N", help="Prompt tokens of a request.")]
OutputLenOption = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of an answer.")]
RangeRatioOption = Annotated[
    float, typer.Option(metavar="RATIO", help="Spread of both lengths: uniform within LEN x (1 +- RATIO).")
]
PrefixLenOption = Annotated[
    int, typer.Option(min=0, metavar="N", help="Tokens before them, the same in every request.")
]
SeedOption = Annotated[int, typer.Option(min=0, metavar="N", help="Of lengths and arrivals.")]
SloOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC:MS",
        help="Bound on ttft, tpot, itl or e2el, such as ttft:200; repeat it, or join with commas.",
        show_default=False,
    ),
]
SloPercentileOption = Annotated[
    float, typer.Option(min=0, max=100, metavar="P", help="The percentile that --slo bounds.")
]
TargetRateOption = Annotated[
    float | None,
    typer.Option(
        metavar="RATE",
        help="Requests per second in all: how many replicas keep --slo?",
        show_default=False,
    ),
]


def parse_slo(texts: list[str] | None) -> dict[str, float]:
    """Bounds in milliseconds, by metric; what is none is refused with a UsageError."""
    return parse_bounds(texts, "--slo", METRICS)
