"""`tessera bench`: load on the engine, its throughput and latencies, and gates on them."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.cli import options
from tessera_cli.cli.answers import check_destination
from tessera_cli.cli.bench_report import BenchFormat, check_gates, document, render_runs
from tessera_cli.cli.loading import load_model
from tessera_cli.cli.output import Output
from tessera_cli.cli.terminal import wants_live
from tessera_cli.errors import ExitCode, UsageError
from tessera_cli.files import write_file
from tessera_cli.serving.workload import DEFAULT_CONCURRENCY, check_range_ratio, check_rate
from tessera_cli.settings import Settings


class Baseline(StrEnum):
    """What the engine is compared with."""

    NONE = "none"
    TRANSFORMERS = "transformers"


def bench(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            "--concurrency",
            "--max-concurrency",
            metavar="N[,N...]",
            help="At most N requests in flight; a list measures one after the other. "
            "[default: 64; with --request-rate no limit]",
            show_default=False,
        ),
    ] = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="[default: 4 x concurrency, or all of --prompt-file]", show_default=False
        ),
    ] = None,
    input_len: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Random prompt tokens of a request. [default: 128]", show_default=False
        ),
    ] = None,
    output_len: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of an answer; end tokens are ignored.")
    ] = 128,
    range_ratio: Annotated[
        float | None,
        typer.Option(
            metavar="RATIO",
            help="Spread of both lengths: uniform within LEN x (1 +- RATIO). [default: 0]",
            show_default=False,
        ),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help="Prompts as for `generate`, instead of random ones; a line's own sampling fields hold.",
            show_default=False,
        ),
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="Poisson arrivals per second. [default: as soon as --concurrency allows]",
            show_default=False,
        ),
    ] = None,
    num_warmups: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Requests before the clock starts, never counted. [default: concurrency]",
            show_default=False,
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, metavar="N", help="Measure this often; the median run is shown.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of prompts, lengths and arrivals.")] = 0,
    baseline: Annotated[
        Baseline, typer.Option(help="Run the same requests through this too and show the ratio.")
    ] = Baseline.NONE,
    percentiles: Annotated[str, typer.Option(metavar="P[,P...]", help="Of the latencies.")] = "50,90,99",
    max_ttft_p99: Annotated[
        float | None,
        typer.Option(min=0, metavar="MS", help="Exit status 3 if p99 TTFT is above.", show_default=False),
    ] = None,
    min_output_throughput: Annotated[
        float | None,
        typer.Option(
            min=0, metavar="TOK/S", help="Exit status 3 if output throughput is below.", show_default=False
        ),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write the results there too: .json, .md, .csv or .txt.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        BenchFormat, typer.Option("--format", help="Of the results on stdout.")
    ] = BenchFormat.TABLE,
    json_output: options.JsonOption = False,
    live: options.LiveOption = None,
    log_interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Between lines when not redrawing in place.")
    ] = 5.0,
    quiet: options.QuietOption = False,
    model_option: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = 16,
    kv_cache_memory: options.KvCacheMemoryOption = 1 << 30,
    num_blocks: options.NumBlocksOption = None,
    max_num_seqs: options.MaxNumSeqsOption = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokensOption = 2048,
    enable_chunked_prefill: options.ChunkedPrefillOption = True,
    attention_backend: options.AttentionBackendOption = "auto",
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Measure the engine under load.

    \b
      tessera bench runs/RUN/export --concurrency 1,8,64
      tessera bench --request-rate 4 --num-prompts 100 --max-ttft-p99 500

    TTFT is submission to first token, queueing included; TPOT is (E2EL - TTFT) / (output tokens - 1);
    ITL is every gap between tokens, its percentiles over gaps; throughput is the total over the wall time.
    With --request-rate a request counts as submitted when it was due. A failed request is never counted as a
    fast one: exit status 1. --max-num-seqs is raised to --concurrency unless it is given.
    """
    settings = Settings.from_env()
    output = Output.of(json=json_output, quiet=quiet)
    if json_output and not (_is_default(context, "form") or form is BenchFormat.JSON):
        raise UsageError(f"--json contradicts --format {form}", hint="give one of them")
    destination = None if output_file is None else check_destination(output_file)
    file_form = None if destination is None else format_of(destination)
    levels = parse_concurrency(concurrency, request_rate)
    percents = parse_percentiles(percentiles)
    if prompt_file is not None and (input_len is not None or range_ratio is not None):
        raise UsageError("--input-len and --range-ratio are for random prompts", hint="or drop --prompt-file")
    if request_rate is not None:
        check_rate(request_rate)
    if range_ratio is not None:
        check_range_ratio(range_ratio)
    from tessera_cli.cli.prompts import read_prompts

    prompts = None if prompt_file is None else read_prompts([], prompt_file)
    shows_live = wants_live(output.console, live, no_progress=settings.no_progress)
    if _is_default(context, "max_num_seqs"):
        max_num_seqs = max(max_num_seqs, *(level or 1 for level in levels))
    model = load_model(
        options.choose_model(model_argument, model_option, settings, output),
        settings,
        output,
        offline=offline,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_cache_memory=kv_cache_memory,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        attention_backend=attention_backend,
    )
    from tessera_cli.cli.bench_load import Load, measure

    load = Load(
        num_prompts=num_prompts,
        input_len=128 if input_len is None else input_len,
        output_len=output_len,
        range_ratio=0.0 if range_ratio is None else range_ratio,
        prompts=prompts,
        request_rate=request_rate,
        num_warmups=num_warmups,
        repeat=repeat,
        seed=seed,
    )
    runs = measure(
        model,
        load,
        levels,
        with_baseline=baseline is Baseline.TRANSFORMERS,
        output=output,
        live=shows_live,
        log_interval=log_interval,
    )
    if json_output:
        output.document(document(runs, percents))
    else:
        output.data(render_runs(runs, form, percents), end="")
    if any(run.result.preemptions for run in runs):
        output.note(
            "hint: preempted requests are computed again; raise --kv-cache-memory or lower --max-num-seqs"
        )
    if destination is not None and file_form is not None:
        write_file(destination, render_runs(runs, file_form, percents))
        output.note(f"wrote {destination}")
    failed = sum(run.num_failed for run in runs)
    if failed:
        errors = sorted({error for run in runs for repeat in run.repeats for error in repeat.errors})
        output.warning(f"{failed} requests failed and are not in the figures: {errors[0]}")
        raise typer.Exit(ExitCode.FAILED)
    check_gates(runs, max_ttft_p99=max_ttft_p99, min_output_throughput=min_output_throughput)


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


def _is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT"
