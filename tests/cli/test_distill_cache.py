import json
import re
from pathlib import Path

import pytest

from tessera_cli.cli.app import run

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def recipe(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe for the tiny model, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TESSERA_HOME", str(tmp_path / "home"))
    for split, count in (("train", 20), ("eval", 4)):
        rows = [{"text": f"{split} {i}: the quick brown fox jumps {i} times"} for i in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(
        f"name: tiny\nteacher: {{model: {tiny_model_dir}, cache: {{kind: hidden}}}}\n"
        "student: {num_hidden_layers: 2}\n"
        "data:\n  train: [{path: train.jsonl, format: text}]\n  eval: [{path: eval.jsonl, format: text}]\n"
        "  max_seq_len: 64\n  train_on: all\ntrain: {max_steps: 3}\n"
    )
    return "tiny.yaml"


def test_a_cache_is_written_told_and_verified(recipe: str, capsys: Capsys) -> None:
    assert run(["distill", "cache", recipe, "--json"]) == 0
    train, held_out = json.loads(capsys.readouterr().out)
    assert (train["split"], held_out["split"]) == ("train", "eval")
    assert train["bytes_per_token"] == train["file_bytes"] / train["num_tokens"]
    assert 0 <= train["kl"] < 1e-4
    assert held_out["kl"] == 0
    assert train["verification"] is None
    assert run(["distill", "cache", recipe, "--verify", "--json"]) == 0
    train, held_out = json.loads(capsys.readouterr().out)
    for split in (train, held_out):
        assert split["verification"]["num_equal"] == split["verification"]["num_recomputed"] > 0


@pytest.mark.parametrize(("kind", "least"), [("topk", 0.5), ("sample", 0.05)])
def test_other_kinds_tell_what_they_keep(recipe: str, kind: str, least: float, capsys: Capsys) -> None:
    assert run(["distill", "cache", recipe, f"teacher.cache.kind={kind}"]) == 0
    output = capsys.readouterr()
    rows = {
        name: figures for name, *figures in (re.split(r"\s{2,}", line) for line in output.out.splitlines())
    }
    assert least < float(rows["kept mass"][0].rstrip("%")) / 100 < 1
    assert float(rows["KL to the teacher"][0]) > 0
    assert max(map(len, output.out.splitlines())) <= 80
    assert "supervised tokens, " in output.err


def test_a_cache_of_another_run_is_refused_in_one_line(recipe: str, capsys: Capsys) -> None:
    path = f"teacher.cache.path={Path.cwd() / 'kept'}"
    assert run(["distill", "cache", recipe, path, "-q"]) == 0
    assert sorted(entry.name for entry in Path("kept").iterdir()) == ["eval", "train"]
    for command in (["distill", "cache"], ["distill"]):
        capsys.readouterr()
        assert run([*command, recipe, path, "seed=1"]) == 2
        error = capsys.readouterr().err
        assert "is the cache of another run: packing (" in error
        assert "seed 0 there" in error
        assert "seed 1 here" in error
        assert "Traceback" not in error
    assert not Path("runs").exists()


def test_what_is_missing_or_damaged_fails_verification(recipe: str, capsys: Capsys) -> None:
    assert run(["distill", "cache", recipe, "--verify"]) == 2
    assert "is not complete" in capsys.readouterr().err
    assert not Path("home/teacher-caches").exists()
    assert run(["distill", "cache", recipe, "-q"]) == 0
    (shard,) = Path("home/teacher-caches").glob("train-*/shard-000000.safetensors")
    content = bytearray(shard.read_bytes())
    content[-600] ^= 1
    shard.write_bytes(content)
    assert run(["distill", "cache", recipe, "--verify"]) == 2
    assert "its bytes are not those that were written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("teacher.cache.kind=none", "has no teacher cache"),
        ("teacher.cache.k=3", "only `kind: topk` has it, and this one is hidden"),
        ("teacher.cache.dtype=bfloat16", 'expected one of "float16", "float32" or null'),
        ("loss.hidden.kind=mse", "needs the teacher's layers"),
    ],
)
def test_what_makes_no_sense_is_refused(recipe: str, override: str, problem: str, capsys: Capsys) -> None:
    assert run(["distill", "cache", recipe, override]) == 2
    assert problem in capsys.readouterr().err


def test_kinds_that_cannot_serve_the_loss_or_the_teacher_are_refused(recipe: str, capsys: Capsys) -> None:
    assert run(["distill", recipe, "teacher.cache.kind=sample", "loss.kind=tvd"]) == 2
    assert "only forward_kl can be learnt from it, not tvd" in capsys.readouterr().err
    assert run(["distill", recipe, "teacher.cache.kind=topk", "teacher.cache.k=100_000"]) == 2
    assert "teacher.cache.k is 100000, but the teacher has 384 tokens" in capsys.readouterr().err
