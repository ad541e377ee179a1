"""Whose time is simulated: the cost model and the engine's sizes, from the options of `tessera simulate`."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tessera_cli.cli import options
from tessera_cli.cli.output import Output
from tessera_cli.engine.config import EngineConfig
from tessera_cli.errors import CapacityError, UsageError
from tessera_cli.serving.cost_model import CostModel, Efficiency, LinearCost
from tessera_cli.serving.gpus import Gpu, find_gpu
from tessera_cli.settings import Settings, prepare_process

if TYPE_CHECKING:
    from tessera_cli.models.config import ModelConfig
    from tessera_cli.serving.calibration import Extent
    from tessera_cli.serving.simulation_result import SimulationResult

_POLICIES = ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")
_MAX_BLOCKS = 1 << 24  # an object each: a few seconds and gigabytes
_LINEAR = ("token_us", "kv_token_ns")
_OF_THE_MODEL = ("dtype", "kv_cache_dtype", "model_argument", "model_option")
_OF_THE_BENCHMARK = (*_OF_THE_MODEL, "kv_cache_memory", "step_ms")
_ROOFLINE = ("compute_efficiency", "memory_efficiency", "gpu_memory_utilization")


@dataclass(frozen=True)
class Machine:
    """What is simulated: `name` tells people, `cost` prices steps, `config` sizes the engine.

    `measured` is the most that the runs had whose steps were timed, where some were.
    """

    name: str
    cost: CostModel
    config: EngineConfig
    fields: dict[str, Any]
    measured: "Extent | None" = None

    def as_dict(self) -> dict[str, Any]:
        return {"machine": self.fields | {"name": self.name}, "engine": asdict(self.config)}

    def doubts(self, result: "SimulationResult") -> str | None:
        """Why not to trust `result`, if it has far more at once than was measured."""
        from tessera_cli.serving.calibration import Extent

        reached = Extent.of(result, self.config)
        if self.measured is None or not reached.is_far_beyond(self.measured):
            return None
        return (
            f"this load has up to {reached.num_requests:,} requests and {reached.num_cached_tokens:,} cached"
            f" tokens at once, the benchmark had {self.measured.num_requests:,} and"
            f" {self.measured.num_cached_tokens:,}: the prediction is a guess; measure a load like this one"
        )


# A prediction that is a quarter off still tells one machine from two.
_POOR_FIT = 0.25


def choose_machine(context: typer.Context, settings: Settings, output: Output) -> Machine:
    """The machine that the command line names.

    Raises:
        UsageError: none or several are named, or an option belongs to another one.
        ModelError, DataError, CapacityError: what is named cannot be read, or does not fit.
    """
    given = context.params
    gpu, calibration = given["gpu"], given["calibration"]
    sources = (gpu, calibration, given["step_ms"])
    if all(source is None for source in sources) or None not in (gpu, calibration):
        raise UsageError(
            "the cost of a step has to come from one place",
            hint="give one of --gpu NAME, --calibration FILE (of `tessera bench --json`) and --step-ms MS",
        )
    if gpu is None:
        _refuse(context, _ROOFLINE, "with --gpu")
    if gpu is not None or calibration is not None:
        _refuse(context, _LINEAR, "with --step-ms, without --gpu or --calibration")
    if calibration is not None:
        return _calibrated(context, calibration, output)
    if gpu is not None:
        return _on_gpu(context, find_gpu(gpu), settings, output)
    cost = LinearCost(
        given["step_ms"] / 1e3, (given["token_us"] or 0) / 1e6, (given["kv_token_ns"] or 0) / 1e9
    )
    if cost.per_step + cost.per_token <= 0:
        raise UsageError("a step that costs nothing", hint="give a positive --step-ms or --token-us")
    model = None
    if given["num_blocks"] is None or given["max_model_len"] is None:
        model = _read_model(context, settings, output)
    else:
        _refuse(context, _OF_THE_MODEL, "without --num-blocks and --max-model-len")
    config = _config(context, model, memory=given["kv_cache_memory"], dtype=_dtype(context, model))
    return Machine("given costs", cost, config, {"cost": asdict(cost)})


def _calibrated(context: typer.Context, path: Path, output: Output) -> Machine:
    from tessera_cli.serving.calibration import calibrate

    _refuse(context, _OF_THE_BENCHMARK, "without --calibration, whose file has it")
    fitted = calibrate(path)
    changes = {
        name: context.params[name]
        for name in (*_POLICIES, "num_blocks", "block_size", "max_model_len")
        if not options.is_default(context, name)
    }
    config = replace(fitted.config, **changes)
    if config.num_kept_blocks is not None:  # as `load_engine` sets it
        kept = None if "num_blocks" in changes else config.blocks_for(config.max_model_len)
        config = replace(config, num_kept_blocks=kept)
    cost = fitted.cost
    if fitted.worst_error > _POOR_FIT:
        output.warning(
            f"the costs of {path} miss one of its own runs by {fitted.worst_error:.0%}: so may predictions"
        )
    name = (
        f"as measured in {path}: {cost.per_step * 1e3:.3g} ms a step, {cost.per_token * 1e6:.3g} us a token,"
        f" {cost.per_context_token * 1e9:.3g} ns a token read; the fit misses"
        f" {fitted.num_runs} runs by at most {fitted.worst_error:.0%}"
    )
    fields = {"cost": asdict(cost), "calibration": str(path), "worst_error": fitted.worst_error}
    return Machine(name, cost, config, fields, fitted.extent)


def _on_gpu(context: typer.Context, gpu: Gpu, settings: Settings, output: Output) -> Machine:
    from tessera_cli.serving.cost_model import DEFAULT_STEP_OVERHEAD
    from tessera_cli.serving.simulated_machine import KVCacheSize, memory_beside_weights, roofline

    given = context.params
    model = _read_model(context, settings, output)
    if model.quantization != "none":
        raise UsageError(
            f"the figures of {gpu.name} are for 16-bit weights, not {model.quantization}",
            hint="take the model that it was made of, or give its cost as --step-ms",
        )
    dtype = _dtype(context, model)
    default = Efficiency()
    compute, memory = given["compute_efficiency"], given["memory_efficiency"]
    efficiency = Efficiency(
        default.compute if compute is None else compute, default.memory if memory is None else memory
    )
    overhead = DEFAULT_STEP_OVERHEAD if given["step_ms"] is None else given["step_ms"] / 1e3
    kv_dtype = dtype if given["kv_cache_dtype"] == "auto" else given["kv_cache_dtype"]
    kv_cache = KVCacheSize.of(model, kv_dtype, given["block_size"])
    cost = roofline(model, gpu, dtype, kv_cache, efficiency, overhead)
    beside = memory_beside_weights(gpu, model, dtype, given["gpu_memory_utilization"])
    asked = given["kv_cache_memory"]
    if given["num_blocks"] is not None:
        asked = given["num_blocks"] * kv_cache.bytes_per_token * kv_cache.block_size
    if asked is not None and asked > beside:
        raise CapacityError(
            f"a KV cache of {asked:,} bytes is more than the {beside:,} of {gpu.name} beside the weights",
            hint="lower --kv-cache-memory or --num-blocks, or raise --gpu-memory-utilization",
        )
    config = _config(context, model, memory=given["kv_cache_memory"] or beside, dtype=dtype)
    name = (
        f"{gpu.name} at {efficiency.compute:.0%} of its arithmetic and {efficiency.memory:.0%} of its"
        f" bandwidth, {overhead * 1e3:g} ms more a step;"
        f" {model.num_parameters / 1e6:,.1f} M parameters, {dtype}"
    )
    if any(window is not None for window in model.layer_windows):
        output.note("note: sliding windows are counted as full attention")
    fields = {"gpu": gpu.name, "efficiency": asdict(efficiency), "step_overhead": overhead, "dtype": dtype}
    return Machine(name, cost, config, fields)


def _config(
    context: typer.Context, model: "ModelConfig | None", *, memory: int | None, dtype: str
) -> EngineConfig:
    """The engine's sizes; blocks are counted, or follow from `memory` bytes."""
    from tessera_cli.serving.simulated_machine import KVCacheSize

    given = context.params
    block_size, num_blocks, max_model_len = given["block_size"], given["num_blocks"], given["max_model_len"]
    if num_blocks is not None and given["kv_cache_memory"] is not None:
        raise UsageError("--num-blocks contradicts --kv-cache-memory", hint="give one of them")
    if num_blocks is None:
        if memory is None or model is None:
            raise UsageError(
                "the size of the KV cache is missing", hint="give --num-blocks or --kv-cache-memory"
            )
        kv_dtype = dtype if given["kv_cache_dtype"] == "auto" else given["kv_cache_dtype"]
        num_blocks = KVCacheSize.of(model, kv_dtype, block_size).num_blocks(memory)
    if num_blocks > _MAX_BLOCKS:
        raise CapacityError(
            f"a pool of {num_blocks:,} blocks is more than the {_MAX_BLOCKS:,} that can be simulated",
            hint="lower --num-blocks or --kv-cache-memory, or raise --block-size",
        )
    if max_model_len is None and model is not None:
        max_model_len = model.max_position_embeddings
    policies = {name: given[name] for name in _POLICIES}
    if options.is_default(context, "max_num_seqs"):
        policies["max_num_seqs"] = max(policies["max_num_seqs"], given["concurrency"] or 1)
    return EngineConfig(num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len, **policies)


def _read_model(context: typer.Context, settings: Settings, output: Output) -> "ModelConfig":
    from tessera_cli.models.config import ModelConfig
    from tessera_cli.models.source import resolve_model

    given = context.params
    name = options.choose_model(given["model_argument"], given["model_option"], settings, output)
    offline = given["offline"] or settings.offline
    prepare_process(offline=offline)
    # Of the model only its config is needed, so that file alone will do.
    if Path(name).name == "config.json" and Path(name).is_file():
        return ModelConfig.from_dir(Path(name).parent)
    return ModelConfig.from_dir(resolve_model(name, home=settings.home, offline=offline, notify=output.note))


def _dtype(context: typer.Context, model: "ModelConfig | None") -> str:
    dtype: str = context.params["dtype"]
    return model.dtype if dtype == "auto" and model is not None else dtype


def _refuse(context: typer.Context, names: tuple[str, ...], where: str) -> None:
    for name in names:
        if not options.is_default(context, name):
            option = "MODEL" if name.startswith("model_") else "--" + name.replace("_", "-")
            raise UsageError(f"{option} means something only {where}", hint="leave it out")
