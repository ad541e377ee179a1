"""The options of `tessera bench` that are its own."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dataset(StrEnum):
    """Where requests come from."""

    RANDOM = "random"
    NANO = "nano"
    SHAREGPT = "sharegpt"
    PROMPTS = "prompts"


DatasetOption = Annotated[
    Dataset | None,
    typer.Option(
        "--dataset",
        "--dataset-name",
        help="random: token ids; nano: token ids with nano-vllm's lengths, from 100 to --input-len and "
        "--output-len; sharegpt: --dataset-path; prompts: --prompt-file. [default: that of the given file, "
        "else random]",
        show_default=False,
    ),
]
DatasetPathOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Conversations as ShareGPT has them, in an order from --seed: the first question is the prompt, "
        "its answer's length the output's unless --output-len is given.",
        show_default=False,
    ),
]
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
NumPrefixesOption = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="So many different ones, taken in turn."),
]
VocabSizeOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Random token ids are below. [default: the model's; with --base-url 10001]",
        show_default=False,
    ),
]
LongInputLenOption = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Random prompt tokens of the last request alone.", show_default=False
    ),
]
TemperatureOption = Annotated[float, typer.Option(min=0, metavar="T", help="0 is greedy.")]
OutputLenOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Tokens of an answer; end tokens are ignored. [default: 128; sharegpt: the answer's]",
        show_default=False,
    ),
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
BurstinessOption = Annotated[
    float,
    typer.Option(
        metavar="SHAPE",
        help="Of the gaps between arrivals: 1 is Poisson, less is burstier, more is steadier.",
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
    str | None,
    typer.Option(
        metavar="transformers|URL",
        help="Run the same requests through this too, transformers in static batches or a server, and show "
        "the ratio.",
        show_default=False,
    ),
]
GoodputOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="METRIC:MS",
        help="Count the requests per second within all of these bounds, on ttft, tpot or e2el; repeat it, or "
        "join with commas.",
        show_default=False,
    ),
]
PercentilesOption = Annotated[str, typer.Option(metavar="P[,P...]", help="Of the latencies.")]
MaxTtftOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="MS", help="Exit status 3 if p99 TTFT is above.", show_default=False),
]
MaxTpotOption = Annotated[
    float | None,
    typer.Option(min=0, metavar="MS", help="Exit status 3 if p99 TPOT is above.", show_default=False),
]
MinGoodputOption = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="REQ/S", help="Exit status 3 if --goodput is met by fewer.", show_default=False
    ),
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
PlotOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw throughput against latency: .png or .svg.", show_default=False),
]
