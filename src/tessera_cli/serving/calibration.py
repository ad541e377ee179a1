"""What steps cost on a machine that was measured, from the figures of `tessera bench --json`.

A closed loop is scheduled by counts alone: whatever steps cost, the same steps come in the same order. So
each figure that is a mean or a sum of times is a known linear combination of what a step, a token and a read
token cost, and simulating with one of these at 1 and the others at 0 gives its coefficients. The costs are
the non-negative least-squares solution of relative errors.
"""

import json
import math
from collections.abc import Sequence as SequenceOf
from dataclasses import astuple, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from tessera_cli.engine.config import EngineConfig
from tessera_cli.errors import DataError
from tessera_cli.serving.cost_model import LinearCost
from tessera_cli.serving.simulated_load import SimulatedLoad
from tessera_cli.serving.simulation_result import SimulationResult
from tessera_cli.serving.simulator import simulate

_UNITS = (LinearCost(1, 0, 0), LinearCost(0, 1, 0), LinearCost(0, 0, 1))
_ENGINE_KEYS = (
    "num_blocks",
    "max_model_len",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "scheduling_policy",
    "num_kept_blocks",
)
_MEASURES = ("duration", "mean_ttft_ms", "mean_itl_ms")


@dataclass(frozen=True)
class MeasuredRun:
    """One closed loop of a benchmark; `measures` are its times in seconds."""

    config: EngineConfig
    load: SimulatedLoad
    measures: dict[str, float]


@dataclass(frozen=True)
class Extent:
    """The most that a run had at once: requests in flight, and tokens in KV blocks."""

    num_requests: int
    num_cached_tokens: int

    @classmethod
    def of(cls, result: SimulationResult, config: EngineConfig) -> "Extent":
        """What `result`, of an engine of `config`, came to."""
        num_blocks = round(result.peak_kv_cache_usage * config.num_usable_blocks)
        return cls(result.max_concurrent_requests, num_blocks * config.block_size)

    def is_far_beyond(self, other: "Extent") -> bool:
        """Whether this one has more than twice what `other` has: fitted lines are a guess there."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return any(mine > 2 * its for mine, its in pairs)


@dataclass(frozen=True)
class Calibration:
    """Costs, the engine that they were measured on, and by how much the fit misses its figures at most.

    Attributes:
        extent: the most that any of the runs had.
    """

    cost: LinearCost
    config: EngineConfig
    num_runs: int
    worst_error: float
    extent: Extent


def calibrate(path: Path) -> Calibration:
    """Fit costs to the result of `tessera bench --json`, best one of several concurrencies.

    Raises:
        DataError: no such file, or nothing in it that can be fitted.
    """
    runs = read_runs(path)
    coefficients, measured, extents = [], [], []
    for run in runs:
        results = [simulate(run.config, run.load, unit) for unit in _UNITS]
        units = [_measures(result) for result in results]
        extents.append(astuple(Extent.of(results[0], run.config)))
        for name, value in run.measures.items():
            coefficients.append([unit[name] / value for unit in units])
            measured.append(1.0)
    costs = non_negative_least_squares(coefficients, measured)
    worst = max(abs(sum(c * cost for c, cost in zip(row, costs, strict=True)) - 1) for row in coefficients)
    extent = Extent(*map(max, zip(*extents, strict=True)))
    return Calibration(LinearCost(*costs), runs[0].config, len(runs), worst, extent)


def read_runs(path: Path) -> list[MeasuredRun]:
    """The runs of a benchmark's JSON.

    Raises:
        DataError: the file cannot be read as one, or a run is not a closed loop of random prompts.
    """
    hint = "write one with `tessera bench --concurrency 1,8,64 --json > FILE`"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"the benchmark {path} cannot be read: {error.strerror}", hint=hint) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}", hint=hint) from None
    if not isinstance(document, dict):
        raise DataError(f"{path} is no benchmark result", hint=hint)
    results = document.get("results", [document])
    try:
        runs = [_run(path, result) for result in results]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        named = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} is no benchmark result: {named}", hint=hint) from None
    if not runs:
        raise DataError(f"{path} has no runs", hint=hint)
    return runs


def non_negative_least_squares(rows: SequenceOf[SequenceOf[float]], values: SequenceOf[float]) -> list[float]:
    """The x >= 0 that minimises |rows x - values|, by trying every set of columns; for a few columns.

    The optimum is an ordinary least-squares solution on the columns where it is positive, so the best of
    those that are not negative is it.
    """
    import numpy as np

    matrix, target = np.asarray(rows, dtype=float), np.asarray(values, dtype=float)
    num_columns = matrix.shape[1]
    best, least = np.zeros(num_columns), float(target @ target)
    for size in range(1, num_columns + 1):
        for columns in map(list, combinations(range(num_columns), size)):
            solution = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            residual = matrix[:, columns] @ solution - target
            error = float(residual @ residual)
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(num_columns), error
                best[columns] = solution
    return [float(x) for x in best]


def _run(path: Path, result: dict[str, Any]) -> MeasuredRun:
    config = result["config"]
    for name, value, wanted in (
        ("config.request_rate", config["request_rate"], None),
        ("config.n", config.get("n", 1), 1),
        ("config.dataset", config.get("dataset", "random"), "random"),
        ("config.num_prefixes", config.get("num_prefixes", 1), 1),
        ("config.long_input_len", config.get("long_input_len"), None),
        ("backend", result.get("backend", "tessera"), "tessera"),
        ("failed", result["failed"], 0),
    ):
        if value != wanted:
            raise DataError(
                f"{path}: a run with {name} {value!r} cannot be fitted",
                hint="measure closed loops of random prompts: --concurrency without --request-rate",
            )
    if config["input_len"] is None:
        raise DataError(f"{path}: a run of a prompt file cannot be fitted", hint="measure random prompts")
    load = SimulatedLoad(
        num_prompts=int(config["num_prompts"]),
        input_len=int(config["input_len"]),
        output_len=int(config["output_len"]),
        range_ratio=float(config["range_ratio"]),
        prefix_len=int(config.get("prefix_len") or 0),
        concurrency=result["max_concurrency"],
        seed=int(config["seed"]),
    )
    measures = {name: float(result[name]) for name in _MEASURES if result[name] is not None}
    if not measures or not all(0 < seconds < math.inf for seconds in measures.values()):
        raise ValueError("a time is missing, or no positive number")
    engine = EngineConfig(**{key: config[key] for key in _ENGINE_KEYS if key in config})
    return MeasuredRun(engine, load, measures)


def _measures(result: SimulationResult) -> dict[str, float]:
    fields = result.as_dict(())
    return {name: fields[name] for name in _MEASURES if fields[name] is not None}
