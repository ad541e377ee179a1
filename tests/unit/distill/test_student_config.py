"""Every way to a student is known to the plan, and what it cannot be is refused there."""

import json
from pathlib import Path

import pytest

from tessera_cli.distill.plan import Plan, plan_recipe
from tessera_cli.distill.students.student_config import student_shape
from tessera_cli.errors import ModelError, UsageError
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.loader import load_recipe
from tessera_cli.recipe.student_section import StudentSection
from tests.families import write_family


@pytest.fixture(scope="module")
def recipe_file(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe")
    rows = [{"text": "The capital of France is Paris."}] * 4
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
train: {{max_steps: 1}}
"""
    )
    return path / "recipe.yaml"


def _plan(recipe_file: Path, student: str, *overrides: str) -> Plan:
    recipe = load_recipe(recipe_file, [f"student={student}", *overrides])
    return plan_recipe(recipe, home=recipe_file.parent, offline=True)


def _copy_of(model: Path, target: Path, **changes: object) -> Path:
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    raw = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | changes))
    return target


def test_a_narrow_student_has_the_sizes_asked_for_and_whole_groups(
    recipe_file: Path, tiny_model_dir: Path
) -> None:
    plan = _plan(recipe_file, "{init: width, hidden_size: 32, intermediate_size: 64, num_attention_heads: 2}")
    assert (plan.layers, plan.student.num_hidden_layers) == ((0, 1, 2), 3)
    assert plan.teacher.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert plan.student.kv_bytes_per_token == 3 * 2 * 1 * 16 * 4  # two query heads are one group
    layer = 32 * (2 * 32 + 2 * 16 + 3 * 64)
    head = 32 * ModelConfig.from_dir(tiny_model_dir).vocab_size
    assert plan.student.gflop_per_token * 1e9 == pytest.approx(2 * (3 * layer + head))
    half = _plan(
        recipe_file, "{init: width, num_key_value_heads: 1, layers: importance, num_hidden_layers: 2}"
    )
    assert half.layers is None
    assert half.student.kv_bytes_per_token == 2 * 2 * 1 * 16 * 4
    queries = _plan(recipe_file, "{init: width, num_attention_heads: 2, num_key_value_heads: 2}")
    assert queries.student.kv_bytes_per_token == plan.teacher.kv_bytes_per_token


def test_pairs_of_layers_that_are_not_there_are_refused_by_the_plan(recipe_file: Path) -> None:
    with pytest.raises(UsageError, match="layer 2 of the student, which has 2"):
        _plan(recipe_file, "{num_hidden_layers: 2}", "loss.hidden={kind: mse, pairs: [[2, 2]]}")
    _plan(recipe_file, "{num_hidden_layers: 3}", "loss.hidden={kind: mse, pairs: [[2, 2]]}")


def test_the_memory_of_projections_is_planned(recipe_file: Path) -> None:
    narrow = "{init: width, hidden_size: 32}"
    plain = _plan(recipe_file, narrow)
    even = _plan(recipe_file, narrow, "loss.hidden={kind: mse}")
    assert even.memory.student - plain.memory.student == 16 * 3 * 32 * 64
    listed = _plan(recipe_file, narrow, "loss.hidden={kind: mse, pairs: [[2, 2]]}")
    assert listed.memory.student - plain.memory.student == 16 * 32 * 64
    as_wide = "{init: width, intermediate_size: 32}"
    with_loss = _plan(recipe_file, as_wide, "loss.hidden={kind: mse}")
    assert with_loss.memory == _plan(recipe_file, as_wide).memory


def test_kv_bytes_are_those_of_the_exported_type(recipe_file: Path) -> None:
    plan = _plan(recipe_file, "{num_hidden_layers: 3}", "export.dtype=bfloat16")
    assert plan.student.kv_bytes_per_token * 2 == plan.teacher.kv_bytes_per_token


def test_a_new_student_takes_what_is_not_said_from_the_teacher(
    recipe_file: Path, tiny_model_dir: Path
) -> None:
    plan = _plan(recipe_file, "{init: config, hidden_size: 16, num_hidden_layers: 5, num_attention_heads: 2}")
    assert (plan.layers, plan.student.num_hidden_layers) == ((), 5)
    assert plan.student.kv_bytes_per_token == 5 * 2 * 1 * 16 * 4
    same = _plan(recipe_file, "{init: config}")
    assert same.student == same.teacher


def test_a_new_student_may_be_of_another_family_with_the_teachers_tokens(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    other = write_family("smollm3-windows", tmp_path)
    teacher = ModelConfig.from_dir(tiny_model_dir)
    section = StudentSection(init="config", model=str(other), num_hidden_layers=2)
    shape = student_shape(section, teacher, Tokenizer.from_dir(tiny_model_dir), home=tmp_path, offline=True)
    assert shape.config.model_type == "smollm3"
    assert shape.config.layer_rotates == (False, True)  # of the layers 0 and 2
    assert (shape.config.vocab_size, shape.config.eos_token_ids) == (
        teacher.vocab_size,
        teacher.eos_token_ids,
    )
    deeper = StudentSection(init="config", model=str(other), num_hidden_layers=4)
    with pytest.raises(UsageError, match="3 layers of its config are not all alike"):
        student_shape(deeper, teacher, Tokenizer.from_dir(tiny_model_dir), home=tmp_path, offline=True)


def test_a_config_that_changed_makes_another_student(tmp_path: Path, tiny_model_dir: Path) -> None:
    teacher, tokenizer = ModelConfig.from_dir(tiny_model_dir), Tokenizer.from_dir(tiny_model_dir)

    def fingerprints(name: str, **changes: object) -> dict[str, str]:
        model = _copy_of(tiny_model_dir, tmp_path / name, **changes)
        section = StudentSection(init="config", model=str(model))
        return student_shape(section, teacher, tokenizer, home=tmp_path, offline=True).fingerprints()

    assert fingerprints("one") == fingerprints("same") != fingerprints("other", rms_norm_eps=1e-3)
    own = StudentSection(num_hidden_layers=2)
    assert student_shape(own, teacher, tokenizer, home=tmp_path, offline=True).fingerprints() == {}


def test_a_model_with_soft_caps_is_refused_and_not_trained_without_them(
    recipe_file: Path, tmp_path: Path
) -> None:
    write_family("gemma2", tmp_path)
    with pytest.raises(ModelError, match=r"gemma2.*not native"):
        _plan(recipe_file, f"{{init: checkpoint, model: {tmp_path}}}")


def test_a_checkpoint_is_itself(recipe_file: Path, tiny_untied_model_dir: Path) -> None:
    plan = _plan(recipe_file, f"{{init: checkpoint, model: {tiny_untied_model_dir}}}")
    assert plan.layers == ()
    assert plan.student.num_parameters == ModelConfig.from_dir(tiny_untied_model_dir).num_parameters


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ("{init: width, hidden_size: 65}", "student.hidden_size is 65, but the teacher has 64"),
        ("{init: width, num_key_value_heads: 3}", "num_key_value_heads is 3, but the teacher has 2"),
        ("{init: width, num_attention_heads: 3}", "2 query heads of the teacher share a key-value head"),
        ("{init: width, num_attention_heads: 3, num_key_value_heads: 2}", "cannot be cut from 2 key-value"),
        ("{init: width, num_attention_heads: 4, num_key_value_heads: 1}", "cannot be cut from 1 key-value"),
        ("{init: config, num_attention_heads: 3}", "do not divide into key-value heads"),
        ("{init: config, num_attention_heads: 4, num_key_value_heads: 3}", "do not divide"),
        ("{init: config, num_key_value_heads: 8, num_attention_heads: 4}", "do not divide"),
        ("{init: checkpoint, model: ./missing}", "no such model"),
    ],
)
def test_a_student_that_cannot_be_is_refused_by_the_plan(
    recipe_file: Path, student: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _plan(recipe_file, student)


def test_a_student_of_other_tokens_is_refused(
    recipe_file: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    # As many ids, two of them exchanged: equal sizes prove nothing.
    permuted = _copy_of(tiny_model_dir, tmp_path / "permuted")
    tokenizer = json.loads((permuted / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (permuted / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="different tokenizers") as caught:
        _plan(recipe_file, f"{{init: checkpoint, model: {permuted}}}")
    assert str(permuted) in caught.value.message
    assert str(tiny_model_dir) in caught.value.message
    assert caught.value.hint


def test_rows_longer_than_the_students_positions_are_refused(
    recipe_file: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    short = _copy_of(tiny_model_dir, tmp_path / "short", max_position_embeddings=32)
    with pytest.raises(UsageError, match="the student has 32 positions"):
        _plan(recipe_file, f"{{init: checkpoint, model: {short}}}")
