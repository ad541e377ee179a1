"""Costs found again in what they made, and the fewest replicas that keep an objective."""

import json
from pathlib import Path

import numpy as np
import pytest

from tessera_cli.engine.config import EngineConfig
from tessera_cli.errors import CapacityError, DataError, GateError, UsageError
from tessera_cli.serving.calibration import calibrate, non_negative_least_squares
from tessera_cli.serving.cost_model import LinearCost
from tessera_cli.serving.gpus import find_gpu
from tessera_cli.serving.replicas import Objective, plan_replicas
from tessera_cli.serving.simulated_load import SimulatedLoad
from tessera_cli.serving.simulated_machine import KVCacheSize, memory_beside_weights
from tessera_cli.serving.simulation_result import SimulationResult
from tessera_cli.serving.simulator import simulate

CONFIG = EngineConfig(num_blocks=400, max_model_len=256, block_size=4, max_num_batched_tokens=64)
COST = LinearCost(0.004, 2e-4, 1e-6)


def bench_json(path: Path, concurrencies: list[int], **changes: object) -> Path:
    """What a benchmark on a machine of exactly COST would write."""
    results = []
    for concurrency in concurrencies:
        load = SimulatedLoad(4 * concurrency, input_len=30, output_len=20, concurrency=concurrency)
        config = {name: value for name, value in load.as_dict().items() if name != "concurrency"}
        config |= {
            "n": 1,
            "num_blocks": 400,
            "max_model_len": 256,
            "block_size": 4,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 64,
            "enable_chunked_prefill": True,
        } | changes
        result = simulate(CONFIG, load, COST).as_dict()
        results.append({"max_concurrency": concurrency, "config": config, **result})
    path.write_text(json.dumps({"results": results}))
    return path


def test_the_costs_behind_a_benchmark_are_found_again(tmp_path: Path):
    fitted = calibrate(bench_json(tmp_path / "bench.json", [1, 4, 16]))
    assert fitted.cost.per_step == pytest.approx(COST.per_step, rel=1e-6)
    assert fitted.cost.per_token == pytest.approx(COST.per_token, rel=1e-6)
    assert fitted.cost.per_context_token == pytest.approx(COST.per_context_token, rel=1e-6)
    assert (fitted.num_runs, fitted.config) == (3, CONFIG)
    assert fitted.worst_error < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_the_best_costs_are_not_negative_and_no_small_change_is_better(seed: int):
    random = np.random.default_rng(seed)
    rows, values = random.normal(size=(9, 3)), random.normal(size=9)
    solution = np.array(non_negative_least_squares(rows, values))
    assert (solution >= 0).all()
    # The conditions of Karush, Kuhn and Tucker.
    slope = rows.T @ (rows @ solution - values)
    assert (slope > -1e-9).all()
    assert np.abs(slope * solution).max() < 1e-9


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"request_rate": 2.0}, "request_rate"), ({"n": 2}, "config.n"), ({"input_len": None}, "prompt file")],
)
def test_a_run_that_is_no_closed_loop_of_random_prompts_is_refused(tmp_path: Path, changes: dict, told: str):
    with pytest.raises(DataError, match=told):
        calibrate(bench_json(tmp_path / "bench.json", [1], **changes))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [{"config": {}}]}', '{"results": 3}'])
def test_what_is_no_benchmark_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(DataError):
        calibrate(path)
    with pytest.raises(DataError, match="cannot be read"):
        calibrate(tmp_path / "missing.json")


def run_at(rate: float) -> SimulationResult:
    load = SimulatedLoad(200, input_len=30, output_len=20, request_rate=rate)
    return simulate(CONFIG, load, COST)


def test_one_replica_fewer_would_miss_the_objective():
    objective = Objective({"ttft": 60.0, "tpot": 9.0}, 99)
    plan = plan_replicas(run_at, objective, 300.0)
    assert plan.num_replicas > 2
    assert plan.rate_per_replica == 300.0 / plan.num_replicas
    assert objective.misses(plan.result) == []
    assert objective.misses(run_at(300.0 / (plan.num_replicas - 1)))


def test_a_queue_that_grows_misses_any_objective():
    objective = Objective({"tpot": 1e9}, 99)
    assert objective.misses(run_at(10_000.0)) == ["more requests arrive than are served"]


def test_an_objective_that_no_replica_keeps_is_told_with_its_figure():
    with pytest.raises(GateError, match=r"p99 TTFT .* is above 1 ms"):
        plan_replicas(run_at, Objective({"ttft": 1.0}, 99), 5.0)


def test_a_model_has_to_fit_the_memory_of_its_gpu(tmp_path: Path):
    from tessera_cli.models.config import ModelConfig

    raw = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32_000,
        "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "hidden_act": "silu",
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    }  # fmt: skip
    model = ModelConfig.from_hf(raw, where="here")
    with pytest.raises(CapacityError, match="do not fit"):
        memory_beside_weights(find_gpu("l4"), model, "bfloat16", 0.9)
    beside = memory_beside_weights(find_gpu("h200"), model, "bfloat16", 1.0)
    assert beside == 141 * 10**9 - 2 * model.num_parameters
    full, small, smallest = (KVCacheSize.of(model, dtype, 16) for dtype in ("bfloat16", "int8", "fp8"))
    assert full.bytes_per_token == 2 * 80 * 8 * 128 * 2
    assert small.bytes_per_token == 2 * 80 * 8 * (128 + 4)
    assert smallest.bytes_per_token == 2 * 80 * 8 * 128
    assert small.num_blocks(beside) > 1.9 * full.num_blocks(beside)
    with pytest.raises(CapacityError, match="two blocks"):
        full.num_blocks(full.bytes_per_token * 31)
    with pytest.raises(UsageError, match="--kv-cache-dtype 'fp7'"):
        KVCacheSize.of(model, "fp7", 16)
