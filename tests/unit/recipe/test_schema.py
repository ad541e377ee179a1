from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from tessera_cli.errors import RecipeError
from tessera_cli.recipe.loader import dump_recipe, load_recipe
from tessera_cli.recipe.schema import LossSection, Recipe
from tessera_cli.recipe.suggest import OTHER_NAMES, key_schemas

Write = Callable[[str], Path]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["train.max_steps=null"], "got none"),
        (["train.max_tokens=5"], "got max_tokens and max_steps; set the others to null"),
        (["loss.kd_weight=0"], "`kd_weight` and `ce_weight` are both 0"),
        (["loss.kd_weight=0", "loss.hidden.kind=none"], "`kd_weight` and `ce_weight` are both 0"),
        (["loss.mixture_weight=0.5"], "`kind: forward_kl` has no mixture"),
        (["loss.kind=jsd", "loss.mixture_weight=1"], "expected a number > 0 and < 1 or null, got 1"),
        (["seed=9223372036854775808"], "expected an integer"),
        (["loss.temperature=0"], "expected a number ≥ 0.01 and ≤ 100, got 0"),
        (["loss.temperature=1e-30"], "expected a number ≥ 0.01 and ≤ 100, got 1e-30"),
        (["student.num_hidden_layers=null"], "required with `layers: even`"),
        (
            ["student.layers=importance", "student.num_hidden_layers=null"],
            "required with `layers: importance`",
        ),
        (["student.layers=[0,1,2]"], "2 disagrees with the 3 layers listed"),
        (["student.layers=[1,0]"], "layer numbers must increase"),
        (["student.layers=[1,1]"], "layer numbers must increase"),
        (["student.layers=[-1,1]"], "expected layer numbers from 0"),
        (["student.layers=[true,2]"], "expected layer numbers from 0"),
        (["student.layers=[]"], "expected layer numbers from 0"),
        (["student.model=org/model"], "`init: teacher_layers` has no use for it"),
        (["student.hidden_size=64"], "`init: teacher_layers` has no use for it"),
        (["student={init: checkpoint}"], "required with `init: checkpoint`"),
        (["student={init: checkpoint, model: org/m, num_hidden_layers: 2}"], "only for model"),
        (["student={init: config, layers: even}"], "`init: config` has no use for it"),
        (["student={init: width}"], "needs one of hidden_size"),
        (["student={init: width, num_hidden_layers: 2, hidden_size: 8}"], "needs `layers: even` or"),
        (["student={init: width, layers: even, hidden_size: 8}"], "required with `layers: even`"),
        (["student.layers=odd"], 'expected "even", "importance" or a list of layer numbers'),
        (["loss.hidden.weight=2"], "`kind: none` has no use for it"),
        (["loss.hidden={kind: mse, pairs: [[0]]}"], "a list of [student layer, teacher layer]"),
        (["loss.hidden={kind: mse, pairs: []}"], "a list of [student layer, teacher layer]"),
        (["loss.hidden={kind: mse, pairs: [[0, true]]}"], "a list of [student layer, teacher layer]"),
        (["loss.hidden={kind: mse, pairs: [[0, 1], [0, 1]]}"], "names a pair twice"),
        (["loss.hidden={kind: mse, weight: 0}"], "expected a number > 0"),
        (
            ["data.on_policy={}", "train.data_parallel=fsdp2"],
            "whole weights, which fsdp2 shards",
        ),
        (["train.micro_batch_size=1_000_000_000_000"], "a step of 1,000,000,000,000 rows is too large"),
        (
            ["train.micro_batch_size=2048", "train.gradient_accumulation_steps=1024"],
            "a step of 2,097,152 rows is too large",
        ),
        (["name=../up"], "expected letters, digits"),
        (["data.max_seq_len=1"], "expected an integer ≥ 2, got 1"),
        (["seed=-1"], "expected an integer ≥ 0 and < 9223372036854775808, got -1"),
    ],
)
def test_what_makes_no_sense_together_is_refused(
    write: Write, sound: str, overrides: list[str], problem: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(sound), overrides)
    assert len(caught.value.problems) == 1
    assert problem in caught.value.problems[0]


def test_a_layer_list_needs_no_count(write: Write, sound: str) -> None:
    recipe = load_recipe(write(sound), ["student.layers=[0,5]", "student.num_hidden_layers=null"]).recipe
    assert recipe.student.layers == [0, 5]


def test_a_resolved_student_reads_back_equal(write: Write, sound: str, tmp_path: Path) -> None:
    for section in (
        "{num_hidden_layers: 2}",
        "{init: width, hidden_size: 8}",
        "{init: width, layers: importance, num_hidden_layers: 2, num_attention_heads: 8}",
        "{init: width, layers: [0, 5], intermediate_size: 8}",
        "{init: config}",
        "{init: config, model: ./x, hidden_size: 8, num_hidden_layers: 40}",
        "{init: checkpoint, model: org/model}",
    ):
        recipe = load_recipe(write(sound), [f"student={section}"]).recipe
        (tmp_path / "resolved.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
        assert load_recipe(tmp_path / "resolved.yaml").recipe == recipe


def test_a_students_model_is_found_from_the_recipe(write: Write, sound: str, tmp_path: Path) -> None:
    path = write(sound)
    recipe = load_recipe(path, ["student={init: checkpoint, model: ./mine}"]).recipe
    assert recipe.student.model == str(Path.cwd() / "mine")
    assert load_recipe(path, ["student={init: config, model: org/m}"]).recipe.student.model == "org/m"


def test_the_mixture_defaults_to_its_kinds_own_weight() -> None:
    weights = {
        kind: LossSection(kind=kind).mixture_weight for kind in ("jsd", "skew_kl", "skew_reverse_kl", "tvd")
    }
    assert weights == {"jsd": 0.5, "skew_kl": 0.1, "skew_reverse_kl": 0.9, "tvd": None}


def test_a_loss_of_hidden_states_alone_is_one(write: Write, sound: str) -> None:
    overrides = ["loss.kd_weight=0", "loss.hidden.kind=mse"]
    assert load_recipe(write(sound), overrides).recipe.loss.hidden.weight == 1


def test_a_recipe_does_not_change(write: Write, sound: str) -> None:
    recipe = load_recipe(write(sound)).recipe
    with pytest.raises(ValidationError, match="frozen"):
        recipe.train.learning_rate = 1.0  # type: ignore[misc]


def test_every_key_is_described() -> None:
    schema = Recipe.model_json_schema()
    assert schema["additionalProperties"] is False
    sections = ("teacher", "student", "data", "loss", "train", "eval", "checkpoint", "export")
    assert [key for key, node in key_schemas().items() if not node.get("description")] == []
    assert set(sections) <= set(schema["properties"])


def test_other_tools_names_lead_to_keys_that_exist() -> None:
    assert set(OTHER_NAMES.values()) <= set(key_schemas())
    own = {key.rpartition(".")[2] for key in key_schemas()}
    # An alpha outside of an adapter is a weight of the loss.
    assert own & OTHER_NAMES.keys() <= {"alpha"}
