"""`tessera simulate`: for a GPU, for given costs, for a measured machine; and what is refused."""

import json
from pathlib import Path

import pytest

from tessera_cli.cli.app import run
from tessera_cli.cli.simulate_options import parse_slo
from tessera_cli.errors import ExitCode, UsageError
from tessera_cli.models.quantization import INT8_CONFIG

COSTS = ["--step-ms", "10", "--num-blocks", "200", "--max-model-len", "512"]
GPU = ["--gpu", "l4", "--dtype", "bfloat16"]
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


@pytest.fixture
def config_json(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return str(path)


@pytest.fixture
def tessera(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["simulate", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_given_costs_and_sizes_need_no_model(tessera):
    code, out, err = tessera(*COSTS, "--concurrency", "2", "--output-len", "10", "--json")
    figures = json.loads(out)
    assert code == ExitCode.SUCCESS
    assert (figures["completed"], figures["num_steps"]) == (8, 40)
    assert figures["duration"] == pytest.approx(40 * 0.010)
    assert figures["mean_itl_ms"] == figures["p99_itl_ms"] == pytest.approx(10.0)
    assert figures["load"]["concurrency"] == 2
    assert figures["engine"]["num_blocks"] == 200
    assert "simulated" in err


def test_the_table_has_the_lines_of_the_benchmark(tessera):
    _, out, _ = tessera(*COSTS, "--request-rate", "5", "--num-prompts", "20", "--quiet")
    for label in ("requests/s", "output tok/s", "KV cache", "prefix hits", "TTFT", "TPOT", "ITL", "E2EL"):
        assert label in out


def test_a_gpu_needs_no_more_of_a_model_than_its_config(tessera, config_json: str):
    def figures(*options: str) -> dict:
        return json.loads(tessera(config_json, *GPU, "--concurrency", "4", "--json", *options)[1])

    plain = figures()
    assert plain["engine"]["max_model_len"] == 2048
    assert plain["machine"]["gpu"] == "l4"
    assert figures("--memory-efficiency", "0.35")["duration"] > plain["duration"]
    assert figures("--step-ms", "30")["duration"] > plain["duration"]
    small = figures("--kv-cache-dtype", "int8")
    assert small["engine"]["num_blocks"] > 1.7 * plain["engine"]["num_blocks"]
    assert figures("--num-blocks", "200")["engine"]["num_blocks"] == 200


def test_a_cache_below_the_longest_sequence_is_refused_as_the_engine_does(tessera, config_json: str):
    code, _, err = tessera(config_json, *GPU, "--num-blocks", "65", "--concurrency", "2")
    assert (code, "max_model_len=2048" in err and "1024" in err) == (ExitCode.USAGE, True)


def test_replicas_are_counted_for_an_objective(tessera, config_json: str):
    options = ["--slo", "ttft:400", "--slo", "tpot:40", "--target-rate", "200", "--num-prompts", "400"]
    code, out, _ = tessera(config_json, *GPU, *options, "--json")
    plan = json.loads(out)
    assert code == ExitCode.SUCCESS
    assert plan["replicas"] > 1
    assert plan["rate_per_replica"] == pytest.approx(200 / plan["replicas"])
    assert plan["p99_ttft_ms"] <= 400
    assert plan["p99_tpot_ms"] <= 40
    assert plan["load"]["request_rate"] == 200
    code, _, err = tessera(config_json, *GPU, "--slo", "ttft:1", "--target-rate", "40", "--num-prompts", "20")
    assert (code, "is above 1 ms" in err) == (ExitCode.GATE, True)


def test_a_measured_machine_brings_its_engine(tessera, tmp_path: Path):
    runs = []
    for concurrency in ("1", "4"):
        options = ["--concurrency", concurrency, "--output-len", "20", "--json"]
        figures = json.loads(tessera(*COSTS, "--token-us", "100", *options)[1])
        config = figures["load"] | figures["engine"]
        runs.append(figures | {"max_concurrency": int(concurrency), "config": config})
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"results": runs}))
    code, out, _ = tessera("--calibration", str(file), "--max-num-seqs", "7", "--concurrency", "2", "--json")
    figures = json.loads(out)
    assert code == ExitCode.SUCCESS
    assert figures["machine"]["cost"]["per_step"] == pytest.approx(0.01, rel=1e-3)
    assert figures["machine"]["cost"]["per_token"] == pytest.approx(1e-4, rel=1e-3)
    assert (figures["engine"]["num_blocks"], figures["engine"]["max_num_seqs"]) == (200, 7)


@pytest.mark.parametrize(
    ("options", "num_kept"),
    [
        ([], 32),
        (["--max-num-seqs", "7"], 32),
        (["--max-model-len", "256"], 16),
        (["--block-size", "32"], 16),
        (["--num-blocks", "200"], None),
    ],
)
def test_a_measured_engine_is_as_sparing_as_one_that_is_loaded_with_these_options(
    tessera, tmp_path: Path, options: list[str], num_kept: int | None
):
    figures = json.loads(tessera(*COSTS, "--concurrency", "2", "--output-len", "20", "--json")[1])
    measured = figures["load"] | figures["engine"] | {"num_kept_blocks": 32}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(figures | {"max_concurrency": 2, "config": measured}))
    asked = ["--calibration", str(file), "--concurrency", "2", "--output-len", "20", "--json"]
    assert json.loads(tessera(*asked, *options)[1])["engine"]["num_kept_blocks"] == num_kept


def test_a_machine_that_its_own_runs_contradict_is_warned_of(tessera, tmp_path: Path):
    runs = []
    for concurrency in (1, 2, 4, 8):
        options = ["--concurrency", str(concurrency), "--output-len", "20", "--json"]
        figures = json.loads(tessera(*COSTS, "--token-us", "100", *options)[1])
        config = figures["load"] | figures["engine"]
        runs.append(figures | {"max_concurrency": concurrency, "config": config})
    file = tmp_path / "bench.json"
    for factor, is_poor in ((1, False), (9, True)):
        runs[2]["mean_itl_ms"] *= factor
        runs[2]["duration"] *= factor
        file.write_text(json.dumps({"results": runs}))
        code, _, err = tessera("--calibration", str(file), "--concurrency", "2")
        assert code == ExitCode.SUCCESS
        assert ("warning: the costs of" in err) == is_poor


@pytest.mark.parametrize(
    ("asked", "is_far"),
    [
        (["--concurrency", "4"], False),
        (["--concurrency", "9"], True),
        (["--concurrency", "4", "--input-len", "360"], True),
        (["--concurrency", "4", "--input-len", "100"], False),
    ],
)
def test_a_load_far_beyond_the_measured_ones_is_told(tessera, tmp_path: Path, asked: list[str], is_far: bool):
    options = ["--concurrency", "4", "--output-len", "20", "--json"]
    figures = json.loads(tessera(*COSTS, *options)[1])
    figures |= {"max_concurrency": 4, "config": figures["load"] | figures["engine"]}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(figures))
    code, _, err = tessera("--calibration", str(file), "--output-len", "20", *asked)
    assert code == ExitCode.SUCCESS
    assert ("the prediction is a guess" in err) == is_far


@pytest.mark.parametrize(
    "text",
    [
        '{"results": []}',
        "[" * 100_000,
        '{"config": 1}',
        json.dumps({"max_concurrency": 2, "failed": 0, "duration": float("nan")}),
    ],
    ids=["empty", "deep", "other", "nan"],
)
def test_a_file_that_measured_nothing_is_refused(tessera, tmp_path: Path, text: str):
    file = tmp_path / "bench.json"
    file.write_text(text)
    code, _, err = tessera("--calibration", str(file))
    assert code == ExitCode.USAGE
    assert "bench --concurrency" in err


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), None])
def test_times_that_no_clock_shows_are_not_fitted(tessera, tmp_path: Path, seconds: float | None):
    figures = json.loads(tessera(*COSTS, "--output-len", "20", "--json")[1])
    figures |= {"max_concurrency": 64, "config": figures["load"] | figures["engine"]}
    figures |= dict.fromkeys(("duration", "mean_ttft_ms", "mean_itl_ms"), seconds)
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(figures))
    code, _, err = tessera("--calibration", str(file))
    assert code == ExitCode.USAGE
    assert "no positive number" in err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "from one place"),
        (["--gpu", "l4", "--calibration", "x"], "from one place"),
        (["--gpu", "abacus"], "no figures for a GPU"),
        ([*COSTS, "--compute-efficiency", "1"], "--compute-efficiency means something only with --gpu"),
        (["--gpu", "l4", "--token-us", "1"], "--token-us means something"),
        (["--calibration", "x", "--dtype", "float16"], "--dtype means something only without --calibration"),
        (["--calibration", "missing.json"], "cannot be read"),
        (["--step-ms", "0", *COSTS[2:]], "costs nothing"),
        ([*COSTS, "--kv-cache-memory", "1g"], "--num-blocks contradicts"),
        ([*COSTS, "--dtype", "float16"], "--dtype means something only without --num-blocks"),
        ([*COSTS, "--slo", "ttft:9"], "belong together"),
        ([*COSTS, "--slo", "ttft:9", "--target-rate", "0"], "request rate 0"),
        ([*COSTS, "--slo", "ttft:9", "--target-rate", "1", "--request-rate", "1"], "contradicts"),
        ([*COSTS, "--burstiness", "-1"], "burstiness"),
        ([*COSTS, "--burstiness", "1e-300"], "burstiness"),
        ([*COSTS, "--request-rate", "1e-300"], "request rate"),
        ([*COSTS, "--num-blocks", "100000000000"], "can be simulated"),
        ([*COSTS, "--input-len", "500"], "longer than max_model_len=512"),
        ([*COSTS, "--live"], "--live needs a terminal"),
    ],
)
def test_mistakes_are_told_before_any_step(tessera, options: list[str], told: str):
    code, out, err = tessera(*options)
    assert (code, out) == (ExitCode.USAGE, "")
    assert told in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--gpu", "l4"], "16-bit weights"),
        ([*GPU, "--num-blocks", "100000000"], "beside the weights"),
        ([*GPU, "--gpu-memory-utilization", "0.01"], "do not fit"),
        ([*GPU, "--gpu-memory-utilization", "2"], "no share"),
        ([*GPU, "--memory-efficiency", "0"], "no share"),
        ([*GPU, "--kv-cache-dtype", "fp7"], "--kv-cache-dtype 'fp7'"),
    ],
)
def test_what_does_not_fit_a_gpu_is_told(tessera, config_json: str, options: list[str], told: str):
    code, _, err = tessera(config_json, *options)
    assert (code, told in err) == (ExitCode.USAGE, True)


def test_int8_weights_have_no_figures_of_a_gpu(tessera, config_json: str):
    Path(config_json).write_text(json.dumps(MODEL | {"quantization_config": INT8_CONFIG}))
    code, _, err = tessera(config_json, *GPU)
    assert (code, "16-bit weights, not int8" in err) == (ExitCode.USAGE, True)


@pytest.mark.parametrize("text", ["ttft", "ttft:x", "ttft:0", "ttft:nan", "speed:3", "ttft:1,ttft:2", ":3"])
def test_a_bound_that_means_nothing_is_refused(text: str):
    with pytest.raises(UsageError, match="is not a bound"):
        parse_slo([text])


def test_bounds_are_repeated_or_joined():
    assert parse_slo(["ttft:200,tpot:30", "e2el:1e3"]) == {"ttft": 200.0, "tpot": 30.0, "e2el": 1000.0}
