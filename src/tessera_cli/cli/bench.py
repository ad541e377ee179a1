"""`tessera bench`: load on the engine, its throughput and latencies, and gates on them."""

from typing import Annotated

import typer

from tessera_cli.cli import bench_options, options, sampling_options
from tessera_cli.cli.answers import check_destination
from tessera_cli.cli.bench_options import Baseline, format_of, parse_concurrency, parse_percentiles
from tessera_cli.cli.bench_report import BenchFormat, check_gates, document, render_runs
from tessera_cli.cli.loading import load_model, tracing
from tessera_cli.cli.output import Output
from tessera_cli.cli.terminal import wants_live
from tessera_cli.errors import ExitCode, UsageError
from tessera_cli.files import write_file
from tessera_cli.serving.workload import check_range_ratio, check_rate
from tessera_cli.settings import Settings


def bench(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    concurrency: bench_options.ConcurrencyOption = None,
    num_prompts: bench_options.NumPromptsOption = None,
    input_len: bench_options.InputLenOption = None,
    prefix_len: bench_options.PrefixLenOption = 0,
    output_len: bench_options.OutputLenOption = 128,
    range_ratio: bench_options.RangeRatioOption = None,
    prompt_file: bench_options.PromptFileOption = None,
    n: sampling_options.NOption = 1,
    request_rate: bench_options.RequestRateOption = None,
    num_warmups: bench_options.NumWarmupsOption = None,
    repeat: bench_options.RepeatOption = 1,
    seed: bench_options.SeedOption = 0,
    baseline: bench_options.BaselineOption = Baseline.NONE,
    percentiles: bench_options.PercentilesOption = "50,90,99",
    max_ttft_p99: bench_options.MaxTtftOption = None,
    min_output_throughput: bench_options.MinOutputThroughputOption = None,
    output_file: bench_options.OutputFileOption = None,
    form: Annotated[
        BenchFormat, typer.Option("--format", help="Of the results on stdout.")
    ] = BenchFormat.TABLE,
    json_output: options.JsonOption = False,
    live: options.LiveOption = None,
    log_interval: options.LogIntervalOption = 5.0,
    quiet: options.QuietOption = False,
    model_option: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    quantization: options.QuantizationOption = "auto",
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = 16,
    kv_cache_dtype: options.KvCacheDtypeOption = "auto",
    kv_cache_memory: options.KvCacheMemoryOption = None,
    gpu_memory_utilization: options.GpuMemoryUtilizationOption = 0.9,
    num_blocks: options.NumBlocksOption = None,
    max_num_seqs: options.MaxNumSeqsOption = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokensOption = 2048,
    enable_chunked_prefill: options.ChunkedPrefillOption = True,
    enable_prefix_caching: options.PrefixCachingOption = True,
    scheduling_policy: options.SchedulingPolicyOption = "fcfs",
    attention_backend: options.AttentionBackendOption = "auto",
    trace: options.TraceOption = None,
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
    if json_output and not (options.is_default(context, "form") or form is BenchFormat.JSON):
        raise UsageError(f"--json contradicts --format {form}", hint="give one of them")
    destination = None if output_file is None else check_destination(output_file, others=[prompt_file])
    file_form = None if destination is None else format_of(destination)
    trace_file = None if trace is None else check_destination(trace, others=[prompt_file, output_file])
    levels = parse_concurrency(concurrency, request_rate)
    percents = parse_percentiles(percentiles)
    if prompt_file is not None and (input_len is not None or range_ratio is not None or prefix_len):
        raise UsageError(
            "--input-len, --prefix-len and --range-ratio are for random prompts", hint="or drop --prompt-file"
        )
    if request_rate is not None:
        check_rate(request_rate)
    if range_ratio is not None:
        check_range_ratio(range_ratio)
    from tessera_cli.cli.prompts import read_prompts

    prompts = None if prompt_file is None else read_prompts([], prompt_file)
    shows_live = wants_live(output.console, live, no_progress=settings.no_progress)
    engine = options.engine_options(context)
    if options.is_default(context, "max_num_seqs"):
        engine["max_num_seqs"] = max(max_num_seqs, *(n * (level or 1) for level in levels))
    model = load_model(
        options.choose_model(model_argument, model_option, settings, output),
        settings,
        output,
        offline=offline,
        engine=engine,
    )
    from tessera_cli.cli.bench_load import Load, measure

    load = Load(
        num_prompts=num_prompts,
        input_len=128 if input_len is None else input_len,
        prefix_len=prefix_len,
        output_len=output_len,
        range_ratio=0.0 if range_ratio is None else range_ratio,
        prompts=prompts,
        n=n,
        request_rate=request_rate,
        num_warmups=num_warmups,
        repeat=repeat,
        seed=seed,
    )
    with tracing(model, trace_file):
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
