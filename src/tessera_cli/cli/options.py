"""Options that several commands share: one spelling, one help text, one way of reading them."""

import re
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from tessera_cli.cli.output import Output
from tessera_cli.errors import UsageError
from tessera_cli.settings import Settings

if TYPE_CHECKING:
    from tessera_cli.engine.loading import EngineOptions

RUNS_DIR = Path("runs")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])(i?[bB])?|[bB])?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Read a positive whole number with an optional suffix: ``4k``, ``1.5M``, ``2GiB``.

    ``GiB``, ``G`` and ``k`` count in 1024, ``GB`` and ``KB`` in 1000 (IEC 80000-13).

    Raises:
        ValueError: the text is not a positive whole number in this notation.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 4096, 4k, 512MiB or 2GiB")
    number, letter, suffix = match.groups()
    base = 1000 if (suffix or "").lower() == "b" else 1024
    size = Decimal(number) * base ** _POWERS[(letter or "").lower()]
    if size != int(size) or size < 1:
        raise ValueError(f"{text!r} is not a positive whole number")
    return int(size)


def size_option(text: str | int) -> int:
    # Typer also gives a parser the option's default.
    if isinstance(text, int):
        return text
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A model directory, a hub id, a .gguf file or package:IMPORT_NAME/FILE.gguf. "
        "Default: $TESSERA_MODEL, else the newest finished run under ./runs.",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help="The same as MODEL.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, also for errors.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Results and errors only.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Use no network, as HF_HUB_OFFLINE=1.")]
DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error, as TESSERA_DEBUG=1.")
]
LiveOption = Annotated[
    bool | None,
    typer.Option("--live/--no-live", help="Redraw in place. [default: on a terminal]", show_default=False),
]
DeviceOption = Annotated[
    str,
    typer.Option(metavar="auto|cpu|cuda", help="Where to compute."),
]
DtypeOption = Annotated[
    str,
    typer.Option(metavar="auto|float32|bfloat16|float16", help="The weights' type."),
]
QuantizationOption = Annotated[
    str,
    typer.Option(
        metavar="auto|none|int8",
        help="Of the weights' matrices; int8 quantises while loading, auto is as the model has them.",
    ),
]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(
        parser=size_option,
        metavar="TOKENS",
        help="Longest prompt and answer together. [default: the model's]",
        show_default=False,
    ),
]
BlockSizeOption = Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens in a KV block.")]
KvCacheDtypeOption = Annotated[
    str,
    typer.Option(
        metavar="auto|float32|float16|bfloat16|int8|fp8",
        help="Type of keys and values; auto is the weights'.",
    ),
]
KvCacheMemoryOption = Annotated[
    int | None,
    typer.Option(
        parser=size_option,
        metavar="SIZE",
        help="Memory of the KV cache. [default: from what is free]",
        show_default=False,
    ),
]
GpuMemoryUtilizationOption = Annotated[
    float,
    typer.Option(metavar="SHARE", help="Of a GPU's memory, for weights and KV cache together."),
]
NumBlocksOption = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="KV blocks, instead of --kv-cache-memory.",
        show_default=False,
    ),
]
MaxNumSeqsOption = Annotated[int, typer.Option(min=1, metavar="N", help="Most sequences in a step.")]
MaxNumBatchedTokensOption = Annotated[
    int,
    typer.Option(
        parser=size_option,
        metavar="TOKENS",
        help="Most tokens in a step. [default: 2048]",
        show_default=False,
    ),
]
ChunkedPrefillOption = Annotated[
    bool,
    typer.Option(
        "--enable-chunked-prefill/--no-enable-chunked-prefill",
        help="Spread a long prompt over several steps.",
    ),
]
PrefixCachingOption = Annotated[
    bool,
    typer.Option(
        "--enable-prefix-caching/--no-enable-prefix-caching",
        help="Compute a beginning that prompts have in common once.",
    ),
]
SchedulingPolicyOption = Annotated[
    str,
    typer.Option(metavar="fcfs|priority", help="Who runs first: who came first, or by `priority`."),
]
AttentionBackendOption = Annotated[
    str,
    typer.Option(metavar="auto|reference|cpu|cuda", help="Attention kernel."),
]
EnforceEagerOption = Annotated[
    bool,
    typer.Option("--enforce-eager", help="On CUDA, capture no graphs of decode steps."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write what each step did, for `tessera trace FILE`.", show_default=False
    ),
]
LogIntervalOption = Annotated[
    float, typer.Option(min=0.1, metavar="SECONDS", help="Between lines when not redrawing in place.")
]

ENGINE_OPTIONS = (
    "device",
    "dtype",
    "quantization",
    "max_model_len",
    "block_size",
    "kv_cache_dtype",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "num_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "scheduling_policy",
    "attention_backend",
    "enforce_eager",
)


def engine_options(context: typer.Context) -> "EngineOptions":
    """What the command line says of the engine; the parameters have the names of the engine's arguments."""
    return cast("EngineOptions", {name: context.params[name] for name in ENGINE_OPTIONS})


def is_default(context: typer.Context, name: str) -> bool:
    """Whether the parameter `name` was not given, which its value alone does not say."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT"


def check_one_model(argument: str | None, option: str | None) -> None:
    """Refuse, with a UsageError, a MODEL and a `--model` that differ."""
    if argument is not None and option is not None and argument != option:
        raise UsageError(f"two models: MODEL is {argument!r}, --model is {option!r}", hint="give one of them")


def choose_model(argument: str | None, option: str | None, settings: Settings, output: Output) -> str:
    """The model of a command: MODEL or --model, else $TESSERA_MODEL, else the newest finished run.

    A choice that the command line does not show is told on stderr.

    Raises:
        UsageError: two different models are given, or there is none.
    """
    check_one_model(argument, option)
    given = argument if argument is not None else option
    if given is not None:
        return given
    if settings.model is not None:
        output.note(f"using $TESSERA_MODEL {settings.model}")
        return settings.model
    from tessera_cli.distill.runs.run_status import list_runs

    finished = [run for run in list_runs(RUNS_DIR) if run.status == "finished" and run.export is not None]
    if not finished:
        raise UsageError(
            "no model: none is given, $TESSERA_MODEL is not set and ./runs has no finished run",
            hint="name one (`--model PATH`), or `tessera distill init` to make one",
        )
    student = str(max(finished, key=lambda run: run.created).export)
    output.note(f"using student {student}")
    return student
