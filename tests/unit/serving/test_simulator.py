"""A simulation equals what the engine's scheduler does, step by step, at the price that it is given."""

import math
import subprocess
import sys
from itertools import pairwise

import pytest

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.stats import percentile
from tessera_cli.errors import CapacityError, UsageError
from tessera_cli.serving.cost_model import Efficiency, LinearCost, RooflineCost, StepLoad
from tessera_cli.serving.gpus import GPUS, find_gpu
from tessera_cli.serving.load_result import METRICS, Distribution
from tessera_cli.serving.simulated_load import SimulatedLoad
from tessera_cli.serving.simulation_result import SimulationResult
from tessera_cli.serving.simulator import simulate
from tessera_cli.serving.workload import gamma_arrivals, random_requests

ONE_A_STEP = LinearCost(1.0, 0.0, 0.0)
COST = LinearCost(0.004, 1e-5, 1e-8)


def engine(**changes: object) -> EngineConfig:
    return EngineConfig(**({"num_blocks": 400, "max_model_len": 256, "block_size": 4} | changes))


def figures(result: SimulationResult) -> dict[str, object]:
    times = ("wall_seconds", "simulated_requests_per_second")
    return {key: value for key, value in result.as_dict().items() if key not in times}


def test_one_request_alone_costs_its_steps():
    result = simulate(engine(), SimulatedLoad(1, input_len=10, output_len=5), ONE_A_STEP)
    assert (result.num_steps, result.duration) == (5, 5.0)
    assert {name: result.latencies[name].mean for name in METRICS} == {
        "ttft": 1.0, "tpot": 1.0, "itl": 1.0, "e2el": 5.0
    }  # fmt: skip
    assert result.latencies["itl"].count == 4
    assert result.peak_kv_cache_usage == math.ceil((10 + 4) / 4) / 399


def test_a_long_prompt_takes_as_many_steps_as_the_budget_makes_it():
    config = engine(max_num_batched_tokens=16)
    result = simulate(config, SimulatedLoad(1, input_len=100, output_len=1), ONE_A_STEP)
    assert result.num_steps == math.ceil(100 / 16)
    assert result.latencies["tpot"].mean is None


def test_costs_are_charged_for_the_tokens_computed_and_read():
    load = SimulatedLoad(1, input_len=10, output_len=3)
    assert simulate(engine(), load, LinearCost(0, 1, 0)).duration == 10 + 1 + 1
    assert simulate(engine(), load, LinearCost(0, 0, 1)).duration == 10 + 11 + 12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("config", "load"),
    [
        ({}, {"concurrency": 8, "range_ratio": 0.5}),
        ({"num_blocks": 70}, {"concurrency": 16, "range_ratio": 0.5}),
        ({"num_blocks": 70}, {"request_rate": 12.0, "range_ratio": 0.9, "prefix_len": 21}),
        ({"num_blocks": 70, "max_num_seqs": 3}, {"request_rate": 3.0, "burstiness": 0.2}),
        ({"max_num_batched_tokens": 24}, {"request_rate": 5.0, "range_ratio": 0.9}),
        ({"enable_prefix_caching": False}, {"request_rate": 2.0, "prefix_len": 30}),
    ],
)
def test_leaving_out_quiet_steps_changes_no_figure(config: dict, load: dict, seed: int):
    whole = SimulatedLoad(40, input_len=30, output_len=50, seed=seed, **load)
    quick = simulate(engine(**config), whole, COST)
    slow = simulate(engine(**config), whole, COST, skips_quiet_steps=False)
    assert figures(quick) == figures(slow)


def test_quiet_steps_are_left_out():
    looks = []
    load = SimulatedLoad(1, input_len=10, output_len=200)
    result = simulate(engine(), load, ONE_A_STEP, on_progress=looks.append)
    assert result.num_steps == 200
    assert len(looks) < 10


def test_every_request_and_token_is_accounted_for_under_preemption():
    load = SimulatedLoad(30, input_len=30, output_len=40, range_ratio=0.5, concurrency=12)
    result = simulate(engine(num_blocks=70), load, COST)
    lengths = list(load.lengths())
    assert result.preemptions > 0
    assert (result.completed, result.max_concurrent_requests) == (30, 12)
    assert result.total_input_tokens == sum(num_in for num_in, _ in lengths)
    assert result.total_output_tokens == sum(num_out for _, num_out in lengths)
    assert result.latencies["itl"].count == result.total_output_tokens - 30
    assert result.latencies["tpot"].count == 30
    # All gaps and the wait for the first token make up the whole, preempted or not.
    latencies = result.latencies
    parts = latencies["itl"].mean * latencies["itl"].count + latencies["ttft"].mean * 30
    assert parts == pytest.approx(latencies["e2el"].mean * 30)
    assert result.peak_kv_cache_usage > 0.9 > 0.9 * result.mean_kv_cache_usage > 0


def test_the_lengths_are_those_of_the_benchmark():
    load = SimulatedLoad(20, input_len=30, output_len=40, range_ratio=0.5, prefix_len=7, seed=5)
    requests = random_requests(
        20, input_len=30, output_len=40, range_ratio=0.5, vocab_size=9, seed=5, prefix_len=7
    )
    assert list(load.lengths()) == [
        (len(request.prompt_token_ids), request.params.max_tokens) for request in requests
    ]
    assert len({tuple(request.prompt_token_ids[:7]) for request in requests}) == 1


def test_a_shared_prefix_is_found_once_it_is_computed():
    load = SimulatedLoad(10, input_len=4, output_len=2, prefix_len=40, concurrency=1)
    result = simulate(engine(), load, COST)
    assert result.prefix_cache_hits == 9 * 40
    assert simulate(engine(enable_prefix_caching=False), load, COST).prefix_cache_hit_rate is None
    own = SimulatedLoad(10, input_len=44, output_len=2, concurrency=1)
    assert simulate(engine(), own, COST).prefix_cache_hits == 0


def test_waiting_counts_from_when_a_request_was_due():
    config = engine(max_num_seqs=1)
    load = SimulatedLoad(3, input_len=4, output_len=10, request_rate=1e6)
    result = simulate(config, load, ONE_A_STEP)
    assert result.percentile_ms("ttft", 100) == pytest.approx(21_000, rel=1e-4)
    assert not simulate(config, SimulatedLoad(60, output_len=10, request_rate=1.0), ONE_A_STEP).keeps_up
    assert simulate(config, SimulatedLoad(60, output_len=10, request_rate=0.01), ONE_A_STEP).keeps_up


def test_bursty_arrivals_keep_their_rate_and_spread_more():
    def spread(burstiness: float) -> float:
        times = gamma_arrivals(20_000, 5.0, 1, burstiness=burstiness)
        gaps = [after - before for before, after in pairwise(times)]
        mean = sum(gaps) / len(gaps)
        assert mean == pytest.approx(1 / 5, rel=0.1)
        return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean

    assert spread(1.0) == pytest.approx(1.0, rel=0.1)
    assert spread(0.25) == pytest.approx(2.0, rel=0.1)
    assert spread(4.0) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("percent", [0, 10, 50, 90, 99, 100])
def test_a_distribution_has_the_percentiles_of_its_values(percent: float):
    values = [3.0, 1.0, 2.0, 2.0, 2.0, 9.0, 4.5]
    assert Distribution.of(values).percentile(percent) == pytest.approx(percentile(values, percent))


def test_a_roofline_is_bound_by_weights_when_small_and_by_arithmetic_when_large(tiny_config):
    gpu = find_gpu("H100-SXM")
    cost = RooflineCost(
        tiny_config,
        gpu,
        weight_bytes=2,
        kv_bytes_per_token=tiny_config.kv_bytes_per_token(2),
        efficiency=Efficiency(1.0, 1.0),
        step_overhead=0.0,
    )
    weights = tiny_config.num_matmul_parameters * 2 / gpu.memory_bandwidth
    read = tiny_config.kv_bytes_per_token(2) / gpu.memory_bandwidth
    assert cost.step_seconds(StepLoad(1, 1, 1, 1)) == pytest.approx(weights + read)
    many = 10**6
    flops = many * tiny_config.flops_per_token() / gpu.flops
    assert cost.step_seconds(StepLoad(many, many, 0, 0)) == pytest.approx(flops)


@pytest.fixture
def tiny_config():
    from tessera_cli.models.config import ModelConfig

    raw = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 256,
        "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "hidden_act": "silu",
    }  # fmt: skip
    return ModelConfig.from_hf(raw, where="here")


def test_figures_of_gpus_are_within_reason():
    assert {"h100-sxm", "h200", "a100-80g", "l4", "rtx-4090"} == set(GPUS)
    for gpu in GPUS.values():
        assert 50 < gpu.flops / gpu.memory_bandwidth < 500
        assert 20e9 < gpu.memory < 200e9
    with pytest.raises(UsageError, match="no figures"):
        find_gpu("abacus")


@pytest.mark.parametrize(
    "load",
    [
        {"num_prompts": 0},
        {"num_prompts": 1, "concurrency": 0},
        {"num_prompts": 1, "output_len": 0},
        {"num_prompts": 1, "range_ratio": 1.0},
        {"num_prompts": 1, "prefix_len": -1},
        {"num_prompts": 1, "request_rate": 0.0},
        {"num_prompts": 1, "burstiness": 0.0},
    ],
)
def test_a_load_that_means_nothing_is_refused(load: dict):
    with pytest.raises(UsageError):
        SimulatedLoad(**load)


def test_requests_that_are_too_long_are_refused_before_any_step():
    with pytest.raises(CapacityError, match="300 tokens"):
        simulate(engine(), SimulatedLoad(1, input_len=200, output_len=100), COST)


def test_no_tensor_library_is_loaded():
    program = (
        "import sys\n"
        "import tessera_cli.serving.calibration, tessera_cli.serving.replicas\n"
        "import tessera_cli.serving.simulated_machine, tessera_cli.engine.chrome_trace\n"
        "sys.exit(','.join({'torch', 'numpy', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
