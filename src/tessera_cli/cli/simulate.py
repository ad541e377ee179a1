"""`tessera simulate`: what an engine would do under a load, on a machine that need not be there."""

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from tessera_cli.cli import options
from tessera_cli.cli import simulate_options as own
from tessera_cli.cli.bench_options import (
    BurstinessOption,
    PercentilesOption,
    RequestRateOption,
)
from tessera_cli.cli.bench_values import parse_percentiles
from tessera_cli.cli.output import Output
from tessera_cli.cli.terminal import wants_live
from tessera_cli.errors import UsageError
from tessera_cli.serving.workload import DEFAULT_CONCURRENCY, check_rate
from tessera_cli.settings import Settings

if TYPE_CHECKING:
    from tessera_cli.cli.simulate_machine import Machine
    from tessera_cli.serving.simulated_load import SimulatedLoad
    from tessera_cli.serving.simulation_result import SimulationResult


def simulate(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    gpu: own.GpuOption = None,
    calibration: own.CalibrationOption = None,
    step_ms: own.StepMsOption = None,
    token_us: own.TokenUsOption = None,
    kv_token_ns: own.KvTokenNsOption = None,
    compute_efficiency: own.ComputeEfficiencyOption = None,
    memory_efficiency: own.MemoryEfficiencyOption = None,
    concurrency: own.ConcurrencyOption = None,
    num_prompts: own.NumPromptsOption = None,
    input_len: own.InputLenOption = 128,
    prefix_len: own.PrefixLenOption = 0,
    output_len: own.OutputLenOption = 128,
    range_ratio: own.RangeRatioOption = 0.0,
    request_rate: RequestRateOption = None,
    burstiness: BurstinessOption = 1.0,
    seed: own.SeedOption = 0,
    slo: own.SloOption = None,
    slo_percentile: own.SloPercentileOption = 99.0,
    target_rate: own.TargetRateOption = None,
    percentiles: PercentilesOption = "50,90,99",
    json_output: options.JsonOption = False,
    live: options.LiveOption = None,
    log_interval: options.LogIntervalOption = 5.0,
    quiet: options.QuietOption = False,
    model_option: options.ModelOption = None,
    dtype: options.DtypeOption = "auto",
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
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Predict throughput and latencies, by the engine's own scheduler and a model of what a step costs.

    \b
      tessera simulate MODEL --gpu h100-sxm --dtype bfloat16 --concurrency 256
      tessera simulate --calibration bench.json --request-rate 4
      tessera simulate MODEL --gpu l4 --slo ttft:500,tpot:50 --target-rate 40

    The cost comes from one of --gpu, --calibration and --step-ms. With --calibration the engine has the
    options of the benchmark unless they are given. With --target-rate the arrivals are shared evenly, and the
    figures are one replica's; a longer run (--num-prompts) sees more of a slow overload.
    """
    settings = Settings.from_env()
    output = Output.of(json=json_output, quiet=quiet)
    percents = parse_percentiles(percentiles)
    bounds = own.parse_slo(slo)
    if bool(bounds) != (target_rate is not None):
        raise UsageError("--slo and --target-rate belong together", hint="give both, or neither")
    if target_rate is not None:
        check_rate(target_rate)
        if request_rate is not None:
            raise UsageError("--request-rate contradicts --target-rate", hint="give one of them")
    shows_live = wants_live(output.console, live, no_progress=settings.no_progress)
    rate = request_rate if target_rate is None else target_rate
    if concurrency is None and rate is None:
        concurrency = DEFAULT_CONCURRENCY
    from tessera_cli.cli.simulate_machine import choose_machine
    from tessera_cli.serving.simulated_load import SimulatedLoad

    load = SimulatedLoad(
        num_prompts=num_prompts or (1000 if rate is not None else 4 * (concurrency or DEFAULT_CONCURRENCY)),
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        prefix_len=prefix_len,
        concurrency=concurrency,
        request_rate=rate,
        burstiness=burstiness,
        seed=seed,
    )
    machine = choose_machine(context, settings, output)
    load.check_lengths(machine.config.max_model_len)
    output.note(f"machine   {machine.name}")
    output.note(
        f"KV cache  {machine.config.num_usable_blocks:,} blocks of {machine.config.block_size} tokens"
    )

    def run(one: "SimulatedLoad") -> "SimulationResult":
        return _run(machine, one, output, live=shows_live, log_interval=log_interval)

    plan_fields: dict[str, Any] = {}
    lines: list[str] = []
    if target_rate is None:
        result = run(load)
        if load.request_rate is not None and not result.keeps_up:
            output.note("note: more requests arrive than are served; latencies grow with --num-prompts")
    else:
        from tessera_cli.cli.simulate_report import plan_lines
        from tessera_cli.serving.replicas import Objective, plan_replicas

        objective = Objective(bounds, slo_percentile)
        plan = plan_replicas(lambda share: run(replace(load, request_rate=share)), objective, target_rate)
        result = plan.result
        lines = plan_lines(plan, objective, target_rate)
        plan_fields = {
            "replicas": plan.num_replicas,
            "target_rate": target_rate,
            "rate_per_replica": plan.rate_per_replica,
            "slo": bounds,
            "slo_percentile": slo_percentile,
        }
    if doubts := machine.doubts(result):
        output.warning(doubts)
    from tessera_cli.cli.simulate_report import report

    if json_output:
        output.document(plan_fields | result.as_dict(percents) | machine.as_dict() | {"load": load.as_dict()})
    else:
        output.data("\n".join([*lines, *report(result, percents)]))
    speed = result.completed / result.wall_seconds
    output.note(f"simulated {speed:,.0f} requests a second, {result.wall_seconds:.1f} s")


def _run(
    machine: "Machine", load: "SimulatedLoad", output: Output, *, live: bool, log_interval: float
) -> "SimulationResult":
    from tessera_cli.cli.simulation_view import SimulationView
    from tessera_cli.serving import simulator

    view = None
    if not output.is_quiet:
        view = SimulationView(output.console, live=live, log_interval=log_interval)
    with view or nullcontext():
        return simulator.simulate(
            machine.config, load, machine.cost, on_progress=None if view is None else view.on_progress
        )
