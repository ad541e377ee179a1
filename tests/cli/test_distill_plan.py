import json
import subprocess
import sys
from pathlib import Path

import pytest

from tessera_cli.cli.app import run
from tessera_cli.recipe.loader import load_recipe

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def recipe(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe for the tiny model, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TESSERA_HOME", str(tmp_path / "home"))
    for split, count in (("train", 20), ("eval", 4)):
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{i}?"},
                    {"role": "assistant", "content": f"It is {i}."},
                ]
            }
            for i in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny.yaml").write_text(
        f"name: tiny\nteacher: {{model: {tiny_model_dir}}}\nstudent: {{num_hidden_layers: 2}}\n"
        "data:\n  train: [{path: train.jsonl, format: messages}]\n"
        "  eval: [{path: eval.jsonl, format: messages}]\n  max_seq_len: 64\ntrain: {max_steps: 3}\n"
    )
    return "tiny.yaml"


def test_the_plan_fits_80_columns_and_names_what_is_not_the_default(recipe: str, capsys: Capsys) -> None:
    assert run(["distill", "plan", recipe, "train.learning_rate=1e-3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [" ".join(line.split()) for line in lines]
    assert "layers 3 2" in rows
    assert "train.learning_rate 0.001 override" in rows
    assert "train.max_steps 3 line 8" in rows
    assert not any(row.startswith("loss.kind") for row in rows)
    assert not Path("runs").exists()


def test_the_plan_tells_what_a_cache_costs(recipe: str, capsys: Capsys) -> None:
    assert run(["distill", "plan", recipe, "teacher.cache={kind: sample, num_samples: 7}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "teacher cache sample, at most" in text
    assert "(at most 29 bytes each)" in text
    assert run(["distill", "plan", recipe]) == 0
    assert "teacher cache" not in capsys.readouterr().out


def test_the_plan_in_json_has_recipe_origins_and_figures(recipe: str, capsys: Capsys) -> None:
    assert run(["distill", "plan", recipe, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["num_steps"] == 3
    assert document["recipe"]["train"]["max_steps"] == 3
    assert document["origins"]["train.max_steps"] == "line 8"


def test_a_dry_run_is_the_plan(recipe: str, capsys: Capsys) -> None:
    assert run(["distill", "plan", recipe]) == 0
    plan = capsys.readouterr().out
    assert run(["distill", recipe, "--dry-run"]) == 0
    assert capsys.readouterr().out == plan


def test_the_yaml_is_the_recipe_with_every_default(recipe: str, capsys: Capsys, tmp_path: Path) -> None:
    assert run(["distill", "plan", recipe, "seed=7", "--yaml"]) == 0
    other = tmp_path / "resolved.yaml"
    other.write_text(capsys.readouterr().out)
    assert load_recipe(other).recipe == load_recipe(Path(recipe), ["seed=7"]).recipe


def test_the_plan_loads_no_torch(recipe: str) -> None:
    program = (
        "import sys\nfrom tessera_cli.cli.app import run\n"
        f"code = run(['distill', 'plan', {recipe!r}])\n"
        "sys.exit(code or ('torch was imported' if 'torch' in sys.modules else 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_init_writes_a_recipe_and_prints_the_two_commands_to_run_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["distill", "init", "mine"]) == 0
    assert capsys.readouterr().out == "tessera distill plan mine.yaml\ntessera distill mine.yaml\n"
    assert run(["distill", "init", "mine"]) == 2
    assert "--force" in capsys.readouterr().err
    assert run(["distill", "init", "mine.yaml", "--force"]) == 0
    assert load_recipe(Path("mine.yaml")).recipe.name == "mine"


def test_resume_with_nothing_to_resume_is_exit_2(recipe: str, capsys: Capsys) -> None:
    assert run(["distill", recipe, "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err


def test_a_run_is_distilled_shown_measured_and_gated(recipe: str, capsys: Capsys) -> None:
    assert run(["distill", recipe, "eval.samples=1", "-o", "out", "--json"]) == 0
    finished = json.loads(capsys.readouterr().out)
    assert finished["status"] == "finished"
    assert run(["distill", "show", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == finished
    assert run(["distill", "eval", "out", "--json"]) == 0
    kl = json.loads(capsys.readouterr().out)["student"]["kl"]
    assert run(["distill", "eval", "out", "--max-kl", str(kl * 1.01)]) == 0
    assert run(["distill", "eval", "out", "--max-kl", str(kl * 0.99), "--json"]) == 3
    shown = capsys.readouterr()
    assert "above" in shown.err
    assert run(["distill", recipe, "-o", "out"]) == 2
    assert "--overwrite" in capsys.readouterr().err
