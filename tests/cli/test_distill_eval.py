"""`tessera distill eval`: any two models, every bound, tasks, and what does not go together."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera_cli.cli.app import run
from tessera_cli.cli.evaluation_view import GATES

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def pair(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options that measure a tiny model with some noise in its weights against itself on three texts."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model_dir, "noisy")
    weights, generator = load_file("noisy/model.safetensors"), torch.Generator().manual_seed(0)
    noisy = {name: w * (1 + 0.1 * torch.randn(w.shape, generator=generator)) for name, w in weights.items()}
    save_file(noisy, "noisy/model.safetensors", metadata={"format": "pt"})
    texts = ("The quick brown fox.", "A small student learns.", "Pages of keys and values.")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    models = ["--teacher", str(tiny_model_dir), "--student", "noisy"]
    data = ["--data", "texts.jsonl", "--format", "text", "--max-seq-len", "64"]
    return ["distill", "eval", *models, *data, "--device", "cpu", "--offline"]


def test_any_two_models_are_measured_and_every_bound_holds_or_is_exit_3(
    pair: list[str], capsys: Capsys
) -> None:
    assert run([*pair, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["start"] is None
    for name, (figure, side) in GATES.items():
        option, value = f"--{name.replace('_', '-')}", document["student"][figure]
        loose, tight = (1.001, 0.999) if side == "above" else (0.999, 1.001)
        assert value > 0
        assert run([*pair, option, str(value * loose)]) == 0
        assert "held out" in capsys.readouterr().out
        assert run([*pair, option, str(value * tight), "--json"]) == 3
        shown = capsys.readouterr()
        assert json.loads(shown.out)["student"] == document["student"]
        assert shown.err.startswith("error: ")
        assert f", {side} {value * tight:g}" in shown.err


def test_all_bounds_that_are_missed_are_told(pair: list[str], capsys: Capsys) -> None:
    assert run([*pair, "--max-kl", "0", "--min-acceptance", "1", "--max-perplexity", "1e9"]) == 3
    error = capsys.readouterr().err
    assert "KL" in error
    assert "acceptance" in error
    assert "perplexity" not in error


def test_what_is_measured_depends_on_limit_target_and_every_file(pair: list[str], capsys: Capsys) -> None:
    Path("one.txt").write_text("What is the capital of France?\n")
    Path("pairs.jsonl").write_text(json.dumps({"prompt": "What is", "completion": " a robot."}) + "\n")

    def num_tokens(*options: str) -> int:
        assert run([*pair, *options, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["student"]["num_tokens"]

    whole = num_tokens()
    assert 0 < num_tokens("--limit", "1") < whole < num_tokens("--data", "one.txt")
    pairs = ["--data", "pairs.jsonl", "--format", "prompt_completion"]
    pair[pair.index("--data") : pair.index("--max-seq-len")] = pairs
    assert num_tokens() < num_tokens("--train-on", "all")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--teacher", "x"], "neither a RUN nor --student, --data, --format"),
        (["RUN", "--teacher", "x", "--max-seq-len", "9"], "no use for --teacher, --max-seq-len"),
        (["RUN", "--train-on", "all"], "no use for --train-on"),
        (["RUN", "--task-limit", "3"], "--task-dir and --task-limit are about tasks"),
        (["RUN", "--max-kl", "nan"], "--max-kl"),
        (["RUN", "--min-agreement", "1.5"], "--min-agreement"),
        (["RUN", "--limit", "0"], "--limit"),
        (["RUN"], "RUN holds no run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_go_together_is_exit_2(
    options: list[str], message: str, capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["distill", "eval", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert "bug" not in shown.err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--format", "prompts", "--format is 'prompts'"),
        ("--train-on", "prompt", "--train-on is 'prompt'"),
        ("--max-seq-len", "3", "nothing to learn from"),
        ("--max-seq-len", "5000", "use --max-seq-len 512"),
        ("--data", "none.jsonl", "no such data file"),
    ],
)
def test_a_pair_that_cannot_be_measured_is_exit_2(
    pair: list[str], option: str, value: str, message: str, capsys: Capsys
) -> None:
    assert run([*pair, option, value]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")  # the harness and what it imports have their own
def test_tasks_stand_beside_the_figures_and_names_may_have_spaces(
    pair: list[str], capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    row = {"question": "The quick", "choices": [" brown fox", " robot"], "answer": 0}
    (tasks / "rows.jsonl").write_text(json.dumps(row) + "\n")
    for name in ("one", "two"):
        (tasks / f"{name}.yaml").write_text(
            f"task: {name}\noutput_type: multiple_choice\ndataset_path: json\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {tasks / 'rows.jsonl'}}}}}\n"
            'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
        )
    options = ["--tasks", "one, two", "--task-dir", str(tasks), "--task-limit", "1"]
    assert run([*pair, *options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["tasks"]
    assert told.keys() == {"one", "two"}
    assert told["one"]["acc"].keys() == {"teacher", "student"}
    assert run([*pair, *options]) == 0
    assert "task  metric" in capsys.readouterr().out
