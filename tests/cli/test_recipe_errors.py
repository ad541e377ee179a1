import json
from pathlib import Path

import pytest

from tessera_cli.cli.app import run

BAD = """\
name: tiny
teacher: {model: org/teacher}
student: {num_hidden_layers: 2}
data:
  train: [{path: a.jsonl, format: text}]
  eval: [{path: b.jsonl, format: text}]
trian: {max_steps: 1}
loss:
  lr: 1e-4
train:
  max_steps: 1
  micro_batch_size: "four"
"""
PAGE = """\
error: tiny.yaml has 3 problems
  line 7   trian: unknown key at top level, did you mean `train`?
  line 9   loss.lr: belongs to section `train` (train.learning_rate)
  line 12  train.micro_batch_size: expected an integer ≥ 1, got "four"

hint: `tessera distill plan --schema` lists every key
"""


@pytest.fixture
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(BAD, encoding="utf-8")
    (tmp_path / "run").write_text(BAD, encoding="utf-8")


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    "arguments",
    [
        ["tiny.yaml"],
        ["./tiny.yaml"],
        ["run", "tiny.yaml"],
        ["--dry-run", "tiny.yaml"],
        ["tiny.yaml", "--dry-run"],
        ["-q", "-o", "out", "tiny.yaml"],
        ["--seed", "3", "tiny.yaml"],
        ["plan", "tiny.yaml"],
    ],
    ids=" ".join,
)
def test_a_bad_recipe_is_told_in_full_before_any_work(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["distill", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err == PAGE
    assert shown.out == ""
    assert not Path("out").exists()
    assert not Path("runs").exists()


@pytest.mark.usefixtures("_here")
def test_with_json_the_problems_are_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["distill", "tiny.yaml", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["type"] == "RecipeError"
    assert [problem.split()[2] for problem in error["problems"]] == [
        "trian:",
        "loss.lr:",
        "train.micro_batch_size:",
    ]


@pytest.mark.usefixtures("_here")
def test_a_file_named_like_a_command_is_reached_by_its_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["distill", "./run"]) == 2
    assert "error: run has 3 problems" in capsys.readouterr().err


@pytest.mark.usefixtures("_here")
@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("pln", "did you mean `tessera distill plan`, or the recipe `pln.yaml`?"),
        ("tiny", "or the recipe `tiny.yaml`?"),
    ],
)
def test_a_word_that_is_neither_command_nor_file_gets_both_suggestions(
    word: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["distill", word]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: '{word}' is neither a command of `tessera distill` nor a file\n")
    assert shown.endswith(hint + "\n")


@pytest.mark.usefixtures("_here")
def test_the_seed_option_is_an_override_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["distill", "tiny.yaml", "seed=1", "--seed", "2"]) == 2
    assert "override  seed: given twice" in capsys.readouterr().err
