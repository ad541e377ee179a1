import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera_cli.errors import RecipeError, UsageError
from tessera_cli.recipe.loader import dump_recipe, load_recipe

Write = Callable[[str], Path]


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    assert caught.value.message.startswith(str(path))
    return [re.sub(r" {2,}", "  ", problem) for problem in caught.value.problems]


def test_every_kind_of_fault_is_told_at_once_with_its_line(write: Write, sound: str) -> None:
    text = sound.replace(
        "train:\n  max", "trian: 1\nloss:\n  lr: 1\ntrain:\n  micro_batch_size: four\n  max", 1
    )
    text = text.replace("  num_hidden_layers", "  num_hidden_layers: 2\n  num_hidden_layers")
    assert text != sound
    found = problems(write(text), "export.dtype=int8", "x")
    assert found == [
        "line 6  student.num_hidden_layers: given twice, first on line 5",
        "line 10  trian: unknown key at top level, did you mean `train`?",
        "line 12  loss.lr: belongs to section `train` (train.learning_rate)",
        'line 14  train.micro_batch_size: expected an integer ≥ 1, got "four"',
        'override  expected KEY=VALUE, got "x"',
        'override  export.dtype: expected one of "auto", "float32", "bfloat16", "float16", got "int8"',
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.lr", "did you mean `learning_rate`?"),
        ("train.learning-rate", "did you mean `learning_rate`?"),
        ("train.leraning_rate", "did you mean `learning_rate`?"),
        ("train.grad_accum_steps", "did you mean `gradient_accumulation_steps`?"),
        ("train.per_device_train_batch_size", "did you mean `micro_batch_size`?"),
        ("train.cutoff_len", "belongs to section `data` (data.max_seq_len)"),
        ("loss.kd_alpha", "did you mean `kd_weight`?"),
        ("loss.learning_rate", "belongs to section `train` (train.learning_rate)"),
        ("student.temperature", "did you mean `data.on_policy.temperature` or `loss.temperature`?"),
        ("student.seed", "did you mean `seed` or `data.on_policy.seed`?"),
        ("lossy", "did you mean `loss`?"),
        ("learning_rate", "belongs to section `train` (train.learning_rate)"),
        ("dtype", "teacher.dtype` or `teacher.cache.dtype` or `train.dtype` or `export.dtype`?"),
        ("data.train.0.fromat", "did you mean `format`?"),
        ("train.zzzzzz", "unknown key"),
    ],
)
def test_an_unknown_key_is_met_with_what_was_meant(write: Write, sound: str, key: str, meant: str) -> None:
    (problem,) = problems(write(sound), f"{key}=1")
    assert problem.startswith(f"override  {key}: ")
    assert problem.endswith(meant)


@pytest.mark.parametrize("value", ["1e-4", "1E-4", ".0001", '"1e-4"', "0.1e-3"])
def test_numbers_are_numbers_in_the_file_and_on_the_command_line(
    write: Write, sound: str, value: str
) -> None:
    from_file = load_recipe(write(f"{sound}  learning_rate: {value}\n"))
    overridden = load_recipe(write(sound), [f"train.learning_rate={value}"])
    assert from_file.recipe.train.learning_rate == overridden.recipe.train.learning_rate == 1e-4


def test_an_override_wins_even_with_the_default_zero_empty_or_null(write: Write, sound: str) -> None:
    path = write(sound + "  weight_decay: 0.5\nloss: {kind: jsd, mixture_weight: 0.3}\n")
    loaded = load_recipe(path, ["train.weight_decay=0", "loss.mixture_weight=null", "data.packing=false"])
    assert loaded.recipe.train.weight_decay == 0
    assert loaded.recipe.loss.mixture_weight == 0.5
    assert loaded.recipe.data.packing is False
    assert str(loaded.origins["train.weight_decay"]) == "override"
    assert problems(write(sound), 'name=""') == [
        'override  name: expected letters, digits, dots, dashes and underscores, got ""'
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("a.0.b=1", "a.0.b: `a` is not a list"),
        ("data.train.1.path=x", "data.train.1.path: `data.train` is a list of 1, there is no `1` in it"),
        ("data.train.first=x", "data.train.first: `data.train` is a list of 1, there is no `first` in it"),
        ("name.first=x", 'name.first: `name` is "tiny", not a section'),
        ("train=3", "train: expected a section, got 3"),
        ("=3", 'expected KEY=VALUE, got "=3"'),
        ("train..x=3", 'expected KEY=VALUE, got "train..x=3"'),
        ("student.layers=[0,", "student.layers: not YAML"),
        ("data.packing=yes", 'data.packing: expected true or false, got "yes"'),
        ("train.micro_batch_size=true", "train.micro_batch_size: expected an integer ≥ 1, got true"),
        ("train.micro_batch_size=0", "train.micro_batch_size: expected an integer ≥ 1, got 0"),
        ("train.micro_batch_size=1.5", "train.micro_batch_size: expected an integer ≥ 1, got 1.5"),
        ("train.learning_rate=.nan", "train.learning_rate: expected a number > 0, got NaN"),
        ("train.warmup_ratio=1", "train.warmup_ratio: expected a number ≥ 0 and < 1, got 1"),
        ("train.max_steps=-1", "train.max_steps: expected an integer ≥ 1 or null, got -1"),
        (
            "train.trackers=[board]",
            'train.trackers.0: expected one of "tensorboard", "wandb", "mlflow", got "board"',
        ),
        ("data.eval=[3]", "data.eval.0: expected a section, got 3"),
        ("data.eval=[]", "data.eval: expected a non-empty list, got []"),
    ],
)
def test_a_wrong_override_is_a_message(write: Write, sound: str, override: str, problem: str) -> None:
    (found,) = problems(write(sound), override)
    assert found.startswith(f"override  {problem}")


def test_the_same_override_twice_is_an_error(write: Write, sound: str) -> None:
    assert problems(write(sound), "seed=1", "seed=2") == ["override  seed: given twice"]


def test_overrides_reach_into_lists_and_replace_them(write: Write, sound: str) -> None:
    loaded = load_recipe(write(sound), ["data.train.0.format=messages", "student.layers=[0,3]"])
    assert loaded.recipe.data.train[0].format == "messages"
    assert loaded.recipe.student.layers == [0, 3]
    assert str(loaded.origins["data.train.0.format"]) == "override"
    assert str(loaded.origins["data.train.0.path"]) == "line 7"


def test_every_value_has_an_origin(write: Write, sound: str) -> None:
    origins = load_recipe(write(sound), ["seed=3"]).origins
    assert {key: str(origin) for key, origin in origins.items() if origin.source != "default"} == {
        "name": "line 1",
        "seed": "override",
        "teacher.model": "line 3",
        "student.num_hidden_layers": "line 5",
        "data.train.0.path": "line 7",
        "data.train.0.format": "line 7",
        "data.eval.0.path": "line 8",
        "data.eval.0.format": "line 8",
        "train.max_steps": "line 10",
    }
    assert str(origins["loss.kind"]) == "default"


def test_paths_start_at_the_recipe_and_overridden_ones_at_the_working_directory(
    write: Write, sound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    cached = sound.replace("org/teacher", "org/teacher\n  cache: {kind: hidden, path: kept}")
    recipe = load_recipe(write(cached), ["data.eval.0.path=mine.jsonl"]).recipe
    assert recipe.teacher.cache.path == str(tmp_path / "kept")
    moved = load_recipe(write(cached), ["teacher.cache.path=kept"]).recipe
    assert moved.teacher.cache.path == str(elsewhere / "kept")
    assert recipe.data.train[0].path == str(tmp_path / "train.jsonl")
    assert recipe.data.eval[0].path == str(elsewhere / "mine.jsonl")
    assert load_recipe(write(sound), ["data.eval=[{path: a, format: text}]"]).recipe.data.eval[0].path == str(
        elsewhere / "a"
    )


@pytest.mark.parametrize(
    ("model", "is_local"),
    [
        ("org/teacher", False),
        ("package:llm_x/a.gguf", False),
        ("./missing", True),
        ("../missing", True),
        ("missing.gguf", True),
        ("here/model", True),
    ],
)
def test_a_teacher_is_local_if_it_exists_or_looks_like_a_path(
    write: Write, sound: str, tmp_path: Path, model: str, is_local: bool
) -> None:
    (tmp_path / "here" / "model").mkdir(parents=True)
    loaded = load_recipe(write(sound.replace("org/teacher", model))).recipe.teacher.model
    assert loaded == (str((tmp_path / model).resolve()) if is_local else model)


def test_the_dumped_recipe_is_read_back_equal(write: Write, sound: str, tmp_path: Path) -> None:
    recipe = load_recipe(
        write(sound), ["student.layers=[0,3]", "train.learning_rate=1e-5", 'name="1e-4"']
    ).recipe
    other = tmp_path / "dumped.yaml"
    other.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(other).recipe == recipe


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}\n"])
def test_an_empty_recipe_lacks_the_required_keys(write: Write, text: str) -> None:
    found = problems(write(text))
    assert [problem.split()[2] for problem in found] == ["name:", "teacher:", "student:", "data:", "train:"]


@pytest.mark.parametrize("text", ["- 1\n", "3\n", "text\n"])
def test_a_recipe_is_made_of_sections(write: Write, text: str) -> None:
    (problem,) = problems(write(text))
    assert "expected sections" in problem


def test_a_missing_or_unreadable_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such recipe"):
        load_recipe(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot read"):
        load_recipe(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


@pytest.mark.parametrize("path", ["~no-such-user/x", '"./a\\0b"', "a" * 5000])
def test_what_can_be_no_path_is_a_problem_of_its_key(write: Write, sound: str, path: str) -> None:
    found = problems(write(sound.replace("org/teacher", path)))
    assert [problem.split(": ")[0] for problem in found] == ["line 3  teacher.model"]
    assert problems(write(sound), f"data.train.0.path={path}" if len(path) < 99 else "seed=x") != []
