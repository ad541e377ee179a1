"""`tessera bench` end to end on a tiny model: loads, presets, sweeps, and what is refused."""

import csv
import io
import json
from pathlib import Path

import pytest
from typer.main import get_command

from tessera_cli.cli.app import app, run
from tessera_cli.cli.bench_presets import PRESETS, Preset
from tessera_cli.errors import ExitCode

SMALL = [
    "--num-blocks",
    "64",
    "--input-len",
    "8",
    "--output-len",
    "4",
    "--device",
    "cpu",
    "--dtype",
    "float32",
]


@pytest.fixture
def tessera(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]):
    """Runs `tessera bench` on the tiny model; the exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["bench", str(tiny_model_dir), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_json_is_one_document_with_the_known_keys(tessera):
    code, out, _ = tessera(*SMALL, "--concurrency", "3", "--json", "--percentiles", "50,99.9")
    figures = json.loads(out)
    assert code == ExitCode.SUCCESS
    assert (figures["completed"], figures["failed"], figures["max_concurrency"]) == (12, 0, 3)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (96, 48)
    assert figures["max_concurrent_requests"] == 3
    assert figures["p99.9_ttft_ms"] >= figures["p50_ttft_ms"] > 0
    assert figures["config"]["num_warmups"] == 3
    assert {"tessera", "torch", "python"} <= set(figures["versions"])
    assert figures["device"]["type"] == "cpu"


def test_a_shared_prefix_is_found_in_the_cache_and_no_run_profits_from_another(tessera):
    # Prompts of 48 + 8 tokens, one after the other: all but the first find three blocks of 16.
    options = (*SMALL, "--num-prompts", "4", "--concurrency", "1", "--repeat", "2", "--prefix-len", "48")
    figures = json.loads(tessera(*options, "--json")[1])
    assert figures["total_input_tokens"] == 4 * 56
    assert figures["prefix_cache_hits"] == 3 * 48
    assert figures["prefix_cache_hit_rate"] == pytest.approx(3 * 48 / (4 * 56))
    without = json.loads(tessera(*options, "--json", "--no-enable-prefix-caching")[1])
    assert (without["prefix_cache_hits"], without["prefix_cache_hit_rate"]) == (0, None)


def test_samples_of_a_prompt_fork(tessera):
    code, out, _ = tessera(*SMALL, "--num-prompts", "2", "--concurrency", "2", "--n", "3", "--json")
    figures = json.loads(out)
    assert (code, figures["completed"], figures["total_output_tokens"]) == (ExitCode.SUCCESS, 2, 2 * 3 * 4)
    # Of three that share the last block of a prompt, two copy it and the last writes in place.
    assert (figures["forks"], figures["block_copies"]) == (4, 4)
    assert figures["config"]["n"] == 3


@pytest.mark.parametrize(
    "field", [{"stop": "x"}, {"ignore_eos": False}, {"cache_salt": "a"}, {"choice": ["b"]}]
)
def test_what_a_benchmark_would_not_do_is_refused(tessera, tmp_path: Path, field: dict[str, object]):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "The", "max_tokens": 2} | field))
    code, _, err = tessera("--num-blocks", "64", "--prompt-file", str(prompts))
    assert (code, "has no place in a benchmark" in err) == (ExitCode.USAGE, True)


def test_a_trace_has_a_line_for_each_step(tessera, tmp_path: Path):
    target = tmp_path / "t.jsonl"
    options = (*SMALL, "--num-prompts", "1", "--concurrency", "1", "--num-warmups", "0")
    assert tessera(*options, "--trace", str(target))[0] == ExitCode.SUCCESS
    assert len(target.read_text().splitlines()) == 1 + 4


def test_a_sweep_and_a_file_hold_every_concurrency(tessera, tmp_path: Path):
    target = tmp_path / "sweep.csv"
    code, out, err = tessera(*SMALL, "--concurrency", "1,2", "--num-prompts", "4", "-o", str(target))
    assert code == ExitCode.SUCCESS
    assert out.count("TTFT ") == 2 + 2
    rows = list(csv.DictReader(io.StringIO(target.read_text())))
    assert [row["max_concurrency"] for row in rows] == ["1", "2"]
    assert [row["total_output_tokens"] for row in rows] == ["16", "16"]
    assert not {"\x1b", "\r"} & set(out + err)


def test_prompts_of_a_file_are_each_used_once(tessera, tmp_path: Path):
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt": "The quick", "max_tokens": 2}, {"messages": [{"role": "user", "content": "Hi"}]}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ["--num-blocks", "64", "--output-len", "3", "--concurrency", "2", "--prompt-file", str(prompts)]
    figures = json.loads(tessera(*options, "--json")[1])
    assert (figures["completed"], figures["total_output_tokens"]) == (2, 5)
    code, _, err = tessera(*options, "--num-prompts", "3")
    assert code == ExitCode.USAGE
    assert "more than the 2" in err


def test_a_rate_has_no_limit_in_flight_unless_one_is_given(tessera):
    options = (*SMALL, "--num-prompts", "3", "--request-rate", "1000", "--num-warmups", "0", "--json")
    figures = json.loads(tessera(*options)[1])
    assert (figures["completed"], figures["max_concurrency"]) == (3, None)
    assert figures["config"]["request_rate"] == 1000
    figures = json.loads(tessera(*options, "--concurrency", "1")[1])
    assert figures["max_concurrent_requests"] == 1


def test_more_sequences_are_allowed_for_a_higher_concurrency(tessera):
    def max_num_seqs(*arguments: str) -> int:
        options = (*SMALL, "--num-prompts", "2", "--num-warmups", "0", "--json", "--concurrency", "300")
        return json.loads(tessera(*options, *arguments)[1])["config"]["max_num_seqs"]

    assert max_num_seqs() == 300
    assert max_num_seqs("--max-num-seqs", "256") == 256


def test_a_missed_gate_is_exit_3_after_the_figures(tessera):
    options = (*SMALL, "--concurrency", "1", "--num-prompts", "2", "--json")
    code, out, err = tessera(*options, "--min-output-throughput", "1e12", "--max-ttft-p99", "1e12")
    assert code == ExitCode.GATE
    assert json.loads(out)["completed"] == 2
    assert "below" in err
    assert "above" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "1,x"], "--concurrency"),
        (["--percentiles", "101"], "--percentiles"),
        (["--input-len", "4", "--prompt-file", "p.txt"], "--input-len: for random prompts"),
        (["--preset", "prefix", "--prompt-file", "p.txt"], "--prefix-len, --num-prefixes, --input-len: for"),
        (["--preset", "nano", "--range-ratio", "0.5"], "--range-ratio: for random prompts"),
        (["--preset", "nano"], "ids up to 10,000"),
        (["--dataset", "sharegpt"], "needs --dataset-path"),
        (["--dataset", "random", "--prompt-file", "p.txt"], "--prompt-file has no place"),
        (["--num-prefixes", "2"], "without a prefix"),
        (["--vocab-size", "5000"], "outside the model's"),
        (["--burstiness", "2"], "--burstiness is of arrivals"),
        (["--request-rate", "1", "--burstiness", "0"], "burstiness"),
        (["--goodput", "itl:5"], "--goodput 'itl:5'"),
        (["--min-goodput", "5"], "--min-goodput without bounds"),
        (["--plot", "p.pdf"], "image format"),
        (["--plot", "r.png", "-o", "r.png"], "suffix"),
        (["--api-key", "x"], "--api-key is for a server"),
        (["--baseline", "vllm"], "neither transformers nor a server"),
        (["--range-ratio", "1"], "range ratio"),
        (["--request-rate", "0"], "request rate"),
        (["--request-rate", "1e-300"], "request rate"),
        (["--trace", "r.json", "-o", "r.json"], "would be overwritten"),
        (["--json", "--format", "md"], "--json contradicts"),
        (["-o", "results.xml"], "suffix"),
        (["--input-len", "400", "--output-len", "200"], "longer than 512"),
    ],
)
def test_a_wrong_command_line_is_told_before_any_request(tessera, arguments: list[str], says: str):
    code, _, err = tessera("--num-blocks", "64", *arguments)
    assert code == ExitCode.USAGE
    assert says in err
    assert "state=" not in err
    assert "warm-up" not in err


def test_a_preset_is_its_options_and_what_is_given_wins(tessera):
    options = ("--preset", "pressure", "--max-model-len", "64", "--num-prompts", "16", "--num-blocks", "33")
    sizes = ("--input-len", "16", "--output-len", "20", "--json", "--num-warmups", "0")
    code, out, err = tessera(*options, *sizes)
    figures = json.loads(out)
    assert code == ExitCode.SUCCESS, err
    # 16 sequences of two blocks each fit into 32, and grow to three.
    assert figures["preemptions"] > 0
    roomy = json.loads(tessera(*options, "--num-blocks", "65", *sizes)[1])
    assert roomy["preemptions"] == 0
    assert roomy["output_sha256"] == figures["output_sha256"]
    config = figures["config"]
    assert (config["preset"], config["num_prompts"], config["num_blocks"]) == ("pressure", 16, 33)
    assert figures["max_concurrency"] == 64


def test_every_preset_is_made_of_options_that_exist():
    context = get_command(app).commands["bench"].commands["run"]
    known = {parameter.name for parameter in context.params}
    assert set(PRESETS) == set(Preset)
    assert {name for values in PRESETS.values() for name in values} <= known


def test_the_shapes_of_the_presets_reach_the_requests(tessera):
    options = ("--num-warmups", "0", "--output-len", "2", "--json", "--num-blocks", "200")
    scale = ("--prefix-len", "32", "--num-prefixes", "2", "--num-prompts", "8", "--input-len", "8")
    prefix = json.loads(tessera("--preset", "prefix", *options, *scale, "--concurrency", "1")[1])
    # Of eight prompts with two beginnings of two blocks, all but the first of each find theirs.
    assert prefix["prefix_cache_hits"] == 6 * 32
    interfere = json.loads(tessera("--preset", "interfere", *options, "--long-input-len", "300")[1])
    assert interfere["total_input_tokens"] == 16 * 32 + 300
    assert interfere["p100_itl_ms"] is not None


def test_the_file_of_a_plot_is_an_image(tessera, tmp_path: Path):
    for name, beginning in (("p.png", b"\x89PNG"), ("p.svg", b"<?xml")):
        target = tmp_path / name
        code, _, err = tessera(*SMALL, "--concurrency", "1,2", "--num-prompts", "2", "--plot", str(target))
        assert (code, target.read_bytes()[: len(beginning)]) == (ExitCode.SUCCESS, beginning)
        assert f"wrote {target}" in err


def test_sharegpt_gives_questions_and_lengths_in_an_order_from_the_seed(tessera, tmp_path: Path):
    path = tmp_path / "share.json"
    talks = [("The quick brown fox", "jumps over"), ("A", "B"), ("Once upon a time", "there was")]
    path.write_text(
        json.dumps(
            [
                {"id": i, "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
                for i, (q, a) in enumerate(talks)
            ]
            + [{"conversations": [{"from": "gpt", "value": "An answer alone"}]}]
        )
    )
    options = ("--num-blocks", "64", "--dataset-path", str(path), "--num-prompts", "3", "--json")
    code, out, err = tessera(*options)
    figures = json.loads(out)
    assert (code, figures["completed"]) == (ExitCode.SUCCESS, 3)
    assert (figures["config"]["dataset"], figures["config"]["input_len"]) == ("sharegpt", None)
    assert "1 conversations begin without" in err
    fixed = json.loads(tessera(*options, "--output-len", "2")[1])
    assert fixed["total_output_tokens"] == 6
    other = json.loads(tessera(*options, "--output-len", "2", "--seed", "5")[1])
    assert other["config"]["prompts_sha256"] != fixed["config"]["prompts_sha256"]
    assert tessera(*options, "--num-prompts", "4")[0] == ExitCode.USAGE


def test_equal_seeds_ask_the_same_and_temperature_samples(tessera):
    options = (*SMALL, "--num-prompts", "3", "--concurrency", "3", "--num-warmups", "0", "--json")
    runs = [
        json.loads(tessera(*options, *more)[1])
        for more in ((), (), ("--seed", "1"), ("--temperature", "5"), ("--temperature", "5"))
    ]
    asked = [run["config"]["prompts_sha256"] for run in runs]
    answered = [run["output_sha256"] for run in runs]
    assert asked[0] == asked[1] != asked[2]
    assert len({asked[0], asked[2], asked[3]}) == 3
    assert answered[0] == answered[1]
    assert answered[3] == answered[4] != answered[0]


def test_quiet_leaves_the_figures_alone(tessera):
    code, out, err = tessera(*SMALL, "--concurrency", "1", "--num-prompts", "1", "-q")
    assert (code, err) == (ExitCode.SUCCESS, "")
    assert "output tok/s" in out
