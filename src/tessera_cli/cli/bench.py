"""`tessera bench`: load on an engine or a server, its throughput and latencies, and gates on them."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tessera_cli.cli import bench_options as own
from tessera_cli.cli import options, sampling_options, server_options
from tessera_cli.cli.answers import check_destination
from tessera_cli.cli.bench_compare import compare
from tessera_cli.cli.bench_plot import plot_format, plot_runs
from tessera_cli.cli.bench_presets import PresetOption
from tessera_cli.cli.bench_report import BenchFormat, document, render_runs
from tessera_cli.cli.bench_run import BenchRun, Gates
from tessera_cli.cli.bench_values import format_of, parse_bounds, parse_concurrency, parse_percentiles
from tessera_cli.cli.loading import load_model, tracing
from tessera_cli.cli.output import Output
from tessera_cli.cli.terminal import wants_live
from tessera_cli.errors import ExitCode, UsageError
from tessera_cli.files import write_file
from tessera_cli.settings import Settings


class BenchGroup(TyperGroup):
    """Takes everything that does not begin with a command's name as arguments of `run`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["run", *args])


app = typer.Typer(
    cls=BenchGroup,
    rich_markup_mode=None,
    help="Measure an engine or a server under load. `tessera bench MODEL` means `tessera bench run MODEL`.",
)
app.command("compare")(compare)


@app.command()
def run(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    preset: PresetOption = None,
    concurrency: own.ConcurrencyOption = None,
    request_rate: own.RequestRateOption = None,
    burstiness: own.BurstinessOption = 1.0,
    num_prompts: own.NumPromptsOption = None,
    dataset: own.DatasetOption = None,
    prompt_file: own.PromptFileOption = None,
    dataset_path: own.DatasetPathOption = None,
    input_len: own.InputLenOption = None,
    prefix_len: own.PrefixLenOption = 0,
    num_prefixes: own.NumPrefixesOption = 1,
    vocab_size: own.VocabSizeOption = None,
    long_input_len: own.LongInputLenOption = None,
    output_len: own.OutputLenOption = None,
    range_ratio: own.RangeRatioOption = None,
    temperature: own.TemperatureOption = 0.0,
    n: sampling_options.NOption = 1,
    num_warmups: own.NumWarmupsOption = None,
    repeat: own.RepeatOption = 1,
    seed: own.SeedOption = 0,
    base_url: server_options.BaseUrlOption = None,
    api_key: server_options.ApiKeyOption = None,
    baseline: own.BaselineOption = None,
    percentiles: own.PercentilesOption = "50,90,99",
    goodput: own.GoodputOption = None,
    max_ttft_p99: own.MaxTtftOption = None,
    max_tpot_p99: own.MaxTpotOption = None,
    min_output_throughput: own.MinOutputThroughputOption = None,
    min_goodput: own.MinGoodputOption = None,
    output_file: own.OutputFileOption = None,
    plot: own.PlotOption = None,
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
    enforce_eager: options.EnforceEagerOption = False,
    trace: options.TraceOption = None,
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Measure an engine, or with --base-url a server, under load.

    \b
      tessera bench runs/RUN/export --concurrency 1,8,64
      tessera bench --request-rate 4 --num-prompts 100 --max-ttft-p99 500
      tessera bench --preset serve --base-url http://127.0.0.1:8000
      tessera bench compare BEFORE.json AFTER.json

    TTFT is submission to first token, queueing included; TPOT is (E2EL - TTFT) / (output tokens - 1);
    ITL is every gap between tokens, its percentiles over gaps; throughput is the total over the wall time.
    With --request-rate a request counts as submitted when it was due. A failed request is never counted as a
    fast one: exit status 1. --max-num-seqs is raised to --concurrency unless it is given. Of a server,
    gaps are between chunks of text as they come, and the server counts the tokens.
    """
    settings = Settings.from_env()
    output = Output.of(json=json_output, quiet=quiet)
    server_options.refuse_engine_options(context, base_url)
    report = _Report(context, output)
    gates = report.gates()
    levels = parse_concurrency(concurrency, request_rate)
    trace_file = None if trace is None else check_destination(trace, others=[prompt_file, output_file, plot])
    from tessera_cli.cli.bench_load import Load

    load = Load.from_options(context, output)
    shows_live = wants_live(output.console, live, no_progress=settings.no_progress)
    from tessera_cli.cli.bench_measure import Measuring, find_baseline
    from tessera_cli.cli.bench_target import EngineTarget, ServerTarget

    compared = find_baseline(baseline, base_url, settings)
    measuring = Measuring(compared, report.bounds, output, shows_live, log_interval)
    if base_url is not None:
        server = server_options.find_server(base_url, model_argument, model_option, api_key, settings)
        output.note(f"server    {server.url}, model {server.model}")
        runs = measuring.measure(ServerTarget(server), load, levels)
    else:
        engine = options.engine_options(context)
        if options.is_default(context, "max_num_seqs"):
            engine["max_num_seqs"] = max(max_num_seqs, *(n * (level or 1) for level in levels))
        name = options.choose_model(model_argument, model_option, settings, output)
        model = load_model(name, settings, output, offline=offline, engine=engine)
        with tracing(model, trace_file):
            runs = measuring.measure(EngineTarget(model), load, levels)
    report.write(runs)
    gates.check(runs)


class _Report:
    """Where the results go and what is held against them; all that can be wrong with it is found at once."""

    def __init__(self, context: typer.Context, output: Output) -> None:
        given = context.params
        self.given, self.output = given, output
        self.form, self.json = given["form"], given["json_output"]
        if self.json and not (options.is_default(context, "form") or self.form is BenchFormat.JSON):
            raise UsageError(f"--json contradicts --format {self.form}", hint="give one of them")
        inputs = [given["prompt_file"], given["dataset_path"]]
        file, plot = given["output_file"], given["plot"]
        self.file = None if file is None else check_destination(file, others=inputs)
        self.file_form = None if file is None else format_of(file)
        self.plot = None if plot is None else check_destination(plot, others=[*inputs, file])
        self.plot_form = "" if plot is None else plot_format(plot)
        self.percentiles = parse_percentiles(given["percentiles"])
        self.bounds = parse_bounds(given["goodput"], "--goodput", ("ttft", "tpot", "e2el"))
        if given["min_goodput"] is not None and not self.bounds:
            raise UsageError("--min-goodput without bounds", hint="give --goodput METRIC:MS")

    def gates(self) -> Gates:
        names = ("max_ttft_p99", "max_tpot_p99", "min_output_throughput", "min_goodput")
        return Gates(**{name: self.given[name] for name in names})

    def write(self, runs: list[BenchRun]) -> None:
        """Write the results wherever they are wanted; a run with failed requests ends the command."""
        output = self.output
        if self.json:
            output.document(document(runs, self.percentiles))
        else:
            output.data(render_runs(runs, self.form, self.percentiles), end="")
        if any(run.result.preemptions for run in runs):
            output.note(
                "hint: preempted requests are computed again; raise --kv-cache-memory or lower --max-num-seqs"
            )
        if self.file is not None and self.file_form is not None:
            write_file(self.file, render_runs(runs, self.file_form, self.percentiles))
            output.note(f"wrote {self.file}")
        if self.plot is not None:
            write_file(self.plot, plot_runs(runs, self.plot_form))
            output.note(f"wrote {self.plot}")
        failed = sum(run.num_failed for run in runs)
        if failed:
            errors = sorted({error for run in runs for error in run.errors})
            output.warning(f"{failed} requests failed and are not in the figures: {errors[0]}")
            raise typer.Exit(ExitCode.FAILED)
