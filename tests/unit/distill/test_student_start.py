"""The untrained student: every way to it, trained, resumed, exported and measured again."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tessera_cli.distill.data.corpus import build_batch
from tessera_cli.distill.evaluation.finished_run import evaluate_run
from tessera_cli.distill.events import TrainStep
from tessera_cli.distill.pipeline import run_recipe
from tessera_cli.distill.runs import run_models
from tessera_cli.distill.students.student import build_student, forward_batch
from tessera_cli.distill.students.student_start import random_decoder
from tessera_cli.errors import UsageError
from tessera_cli.models.loader import load_decoder, save_decoder
from tessera_cli.recipe.loader import load_recipe
from tests.families import plain_attend, random_tokens, transformers_model, write_family
from tests.training_factories import assert_same_bits, copy_weights, make_decoder, make_documents


@pytest.mark.parametrize("family", ["llama-biases", "qwen3-windows", "smollm3-windows", "mistral", "granite"])
@torch.no_grad()
def test_chosen_layers_keep_their_windows_and_rotations(family: str, tmp_path: Path) -> None:
    """Layers 0 and 2 are a teacher whose layer 1 is left out, also to transformers."""
    (tmp_path / "teacher").mkdir()
    (tmp_path / "export").mkdir()
    teacher = load_decoder(write_family(family, tmp_path / "teacher"), dtype=torch.float32)
    student = build_student(teacher, [0, 2])
    batch = build_batch(make_documents([30, 12]))
    teacher.layers[1].forward = lambda index, x, *_: x
    assert torch.equal(forward_batch(student, batch), forward_batch(teacher, batch))
    save_decoder(student, tmp_path / "export", dtype=torch.float32)
    token_ids = torch.tensor(random_tokens(30))
    hidden = student(token_ids, torch.arange(30), plain_attend(student.attention_layers))
    theirs = transformers_model(tmp_path / "export")(token_ids[None]).logits[0]
    torch.testing.assert_close(student.logits(hidden), theirs, rtol=1e-4, atol=1e-4)


def test_random_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    config = make_decoder(1, num_hidden_layers=8, tied=False).config
    config = dataclasses.replace(config, qkv_bias=True, hidden_size=64, intermediate_size=64)
    torch.manual_seed(1)
    first = random_decoder(config, seed=5)
    torch.manual_seed(2)
    assert_same_bits(copy_weights(first), copy_weights(random_decoder(config, seed=5)))
    other = random_decoder(config, seed=6)
    assert not torch.equal(first.head_weight, other.head_weight)
    layer = first.layers[3]
    assert layer.qkv_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert layer.down_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert layer.qkv_proj.bias.count_nonzero() == 0
    assert (layer.input_layernorm.weight == 1).all()


@pytest.fixture(scope="module")
def recipe_file(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe")
    rows = [{"text": f"The capital of France is Paris, the robot {i} says."} for i in range(12)]
    (path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "recipe.yaml").write_text(
        f"""
name: tiny
teacher: {{model: {tiny_model_dir}}}
student: {{num_hidden_layers: 2}}
data:
  train: [{{path: data.jsonl, format: text}}]
  eval: [{{path: data.jsonl, format: text}}]
  max_seq_len: 64
  train_on: all
train: {{max_steps: 3, micro_batch_size: 1}}
eval: {{samples: 0}}
"""
    )
    return path / "recipe.yaml"


STUDENTS = {
    "width": "{init: width, layers: [0, 2], hidden_size: 32, num_key_value_heads: 1}",
    "config": "{init: config, hidden_size: 32, num_hidden_layers: 2}",
    "checkpoint": "{init: checkpoint, model: MODEL}",
}


@pytest.mark.parametrize("init", STUDENTS)
def test_a_run_resumes_to_the_same_bits_and_is_measured_again(
    init: str, recipe_file: Path, tiny_untied_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = STUDENTS[init].replace("MODEL", str(tiny_untied_model_dir))
    recipe = load_recipe(recipe_file, [f"student={section}"])
    where = {"device": "cpu", "offline": True, "home": tmp_path}

    def run(name: str, *, resume: bool = False, listener=lambda event: None):
        return run_recipe(
            recipe, run_dir=tmp_path / name, listener=listener, resume=resume, overwrite=False, **where
        )

    def stop(event: object) -> None:
        if isinstance(event, TrainStep):
            raise KeyboardInterrupt

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("cut", listener=stop)
    monkeypatch.setattr(run_models, "decide_start", None)  # what was decided is not decided again
    resumed = run("cut", resume=True)
    weights = [load_file(result.export / "model.safetensors") for result in (whole, resumed)]
    assert_same_bits(*weights)
    figures = evaluate_run(tmp_path / "whole", limit=None, listener=lambda event: None, **where)
    assert dataclasses.asdict(figures.start) == pytest.approx(dataclasses.asdict(whole.start))
    assert dataclasses.asdict(figures.student) == pytest.approx(dataclasses.asdict(whole.end))
    said = {"width": "cut to 32 channels", "config": "random weights", "checkpoint": "started from `/"}
    assert said[init] in whole.report.read_text(encoding="utf-8")


def test_a_checkpoint_that_changed_is_not_resumed(
    recipe_file: Path, tiny_untied_model_dir: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_untied_model_dir.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    recipe = load_recipe(recipe_file, [f"student={{init: checkpoint, model: {model}}}"])

    def stop(event: object) -> None:
        if isinstance(event, TrainStep):
            raise KeyboardInterrupt

    where = {"run_dir": tmp_path / "run", "device": "cpu", "offline": True, "home": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        run_recipe(recipe, listener=stop, resume=False, overwrite=False, **where)
    changed = load_decoder(model, dtype=torch.float32)
    with torch.no_grad():
        changed.norm.weight.mul_(2)
    save_decoder(changed, model, dtype=torch.float32)
    with pytest.raises(UsageError, match="changed since it began: student"):
        run_recipe(recipe, listener=lambda event: None, resume=True, overwrite=False, **where)
