"""A plan tells what the run will do, without loading what only the run needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tessera_cli.distill.plan import plan_recipe
from tessera_cli.errors import DataError, UsageError
from tessera_cli.models.config import ModelConfig
from tessera_cli.recipe.loader import load_recipe


@pytest.fixture
def recipe_file(tiny_model_dir: Path, tmp_path: Path) -> Path:
    rows = [{"prompt": "What is", "completion": " text" * (1 + i % 4)} for i in range(20)]
    rows.append({"prompt": "What is", "completion": " text" * 200})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        f"""
name: tiny
teacher: {{model: {tiny_model_dir}}}
student: {{num_hidden_layers: 2}}
data:
  train: [{{path: data.jsonl, format: prompt_completion}}]
  eval: [{{path: data.jsonl, format: prompt_completion}}]
  max_seq_len: 32
train: {{num_epochs: 2, micro_batch_size: 2, gradient_accumulation_steps: 2}}
"""
    )
    return tmp_path / "recipe.yaml"


def plan(recipe_file: Path, *overrides: str):
    return plan_recipe(load_recipe(recipe_file, overrides), home=recipe_file.parent, offline=True)


def test_the_plan_counts_documents_tokens_and_steps(recipe_file):
    told = plan(recipe_file)
    assert (told.num_documents, told.num_eval_documents, told.num_too_long) == (20, 20, 2)
    assert told.num_epochs == 2
    assert plan(recipe_file, "train.num_epochs=1").num_tokens * 2 == told.num_tokens
    unpacked = plan(recipe_file, "data.packing=false")
    assert unpacked.num_steps == 2 * 20 / 4 > told.num_steps
    assert unpacked.num_tokens == told.num_tokens
    everything = plan(recipe_file, "data.train_on=all")
    assert everything.num_supervised_tokens == told.num_tokens - 2 * 20
    assert any("1 of 21 documents are longer" in note for note in told.notes)


def test_a_run_without_end_is_planned_at_once_and_said_to_be_estimated(recipe_file):
    assert not plan(recipe_file).is_estimate
    endless = plan(recipe_file, "train.num_epochs=null", "train.max_steps=1_000_000_000_000")
    assert endless.is_estimate
    assert endless.num_steps == 10**12
    assert endless.num_tokens / endless.num_epochs == pytest.approx(
        plan(recipe_file).num_tokens / 2, rel=0.01
    )
    answered = "data.on_policy={fraction: 0.5, max_tokens: 8}"
    endless = plan(recipe_file, "train.num_epochs=null", "train.max_steps=1_000_000_000_000", answered)
    assert endless.num_on_policy_steps == pytest.approx(5e11, rel=0.02)
    for length in ("train.max_tokens=1_000_000_000_000", "train.num_epochs=1_000_000_000_000"):
        ended = () if "epochs" in length else ("train.num_epochs=null",)
        assert plan(recipe_file, *ended, length).is_estimate


@pytest.mark.parametrize(
    "cache",
    [
        "{kind: hidden}",
        "{kind: hidden, dtype: float32}",
        "{kind: topk, k: 5}",
        "{kind: sample, num_samples: 300}",
    ],
)
def test_a_cache_costs_what_the_plan_says(recipe_file, cache):
    from tessera_cli.distill.teacher_cache.command import cache_recipe

    override = f"teacher.cache={cache}"
    told = plan(recipe_file, override).cache
    recipe = load_recipe(recipe_file, [override]).recipe
    train, held_out = (
        report.figures
        for report in cache_recipe(
            recipe,
            verify=False,
            listener=lambda event: None,
            device="cpu",
            offline=True,
            home=recipe_file.parent,
        )
    )
    assert told.num_tokens == train.num_tokens
    for figures, expected in ((train, told.train_bytes), (held_out, told.eval_bytes)):
        rest = 64 * figures.num_documents + 1024 * figures.num_shards
        assert figures.file_bytes <= expected + rest
    assert held_out.file_bytes >= told.eval_bytes
    if told.kind != "sample":
        assert train.file_bytes >= told.train_bytes


def test_a_held_out_document_of_more_tokens_than_are_asked_for_counts_whole(recipe_file, tiny_model_dir):
    cached = ("teacher.cache={kind: hidden}", "data.train_on=all")
    (one,) = {plan(recipe_file, *cached, f"eval.max_tokens={most}").cache.eval_bytes for most in (1, 2)}
    assert one > 2 * 4 * ModelConfig.from_dir(tiny_model_dir).hidden_size


def test_a_cache_leaves_the_teachers_layers_out(recipe_file, tiny_model_dir):
    online, hidden, topk = (
        plan(recipe_file, f"teacher.cache.kind={kind}") for kind in ("none", "hidden", "topk")
    )
    teacher = ModelConfig.from_dir(tiny_model_dir)
    head = 2 * teacher.vocab_size * teacher.hidden_size / 1e9
    assert online.cache is None
    assert hidden.gflop_per_token - topk.gflop_per_token == pytest.approx(head)
    assert online.gflop_per_token - topk.gflop_per_token == pytest.approx(online.teacher.gflop_per_token)
    layers = teacher.num_hidden_layers * teacher.num_layer_parameters
    assert online.memory.teacher - hidden.memory.teacher == 4 * layers
    # Each document passes through the teacher once, however many epochs there are; of `hidden` not its head.
    assert topk.cache.gflop < online.teacher.gflop_per_token * online.num_tokens / 2
    once = topk.cache.gflop / online.teacher.gflop_per_token
    assert topk.cache.gflop - hidden.cache.gflop == pytest.approx(once * head)


def test_sizes_and_work_are_those_of_the_models(recipe_file, tiny_model_dir):
    told = plan(recipe_file)
    teacher = ModelConfig.from_dir(tiny_model_dir)
    layer = teacher.num_layer_parameters
    assert told.teacher.num_parameters - told.student.num_parameters == layer
    assert told.layers == (0, 2)
    matmuls = [config * 1e9 / 2 for config in (told.student.gflop_per_token, told.teacher.gflop_per_token)]
    assert told.gflop_per_token * 1e9 == pytest.approx(6 * matmuls[0] + 2 * matmuls[1])
    assert told.memory.student == 16 * told.student.num_parameters
    assert told.memory.teacher == 4 * told.teacher.num_parameters
    assert told.teacher.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4
    assert plan(recipe_file, "student.layers=importance").layers is None


def test_the_plan_is_plain_json(recipe_file):
    told = plan(recipe_file)
    values = json.loads(json.dumps(told.as_dict()))
    assert values["num_steps"] == told.num_steps
    assert values["memory"]["total"] == told.memory.total


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("student.num_hidden_layers=4", "is 4, but the teacher has 3 layers"),
        ("student={layers: [1, 3]}", "names layer 3, but the teacher has 3"),
        ("data.max_seq_len=1000", "the teacher has 512 positions"),
        ("data.max_seq_len=2", "nothing to learn from"),
        ("teacher.model=./missing", "no such model"),
    ],
)
def test_what_cannot_run_is_told_by_the_plan(recipe_file, override, message):
    with pytest.raises(UsageError, match=message):
        plan(recipe_file, override)


def test_planning_and_listing_runs_load_no_torch(recipe_file):
    code = f"""
import sys
from pathlib import Path
from tessera_cli.distill.plan import plan_recipe
from tessera_cli.distill.runs.run_status import list_runs
from tessera_cli.recipe.loader import load_recipe
list_runs(Path("."))
assert "datasets" not in sys.modules
plan_recipe(load_recipe(Path({str(recipe_file)!r})), home=Path({str(recipe_file.parent)!r}), offline=True)
assert not {{"torch", "transformers", "accelerate", "matplotlib"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_missing_documents_are_told_before_the_teacher_is_looked_for(recipe_file):
    # Looking for it can mean a download or a conversion.
    with pytest.raises(DataError, match=r"no such data file: .*gone\.jsonl"):
        plan(recipe_file, "data.eval.0.path=gone.jsonl", "teacher.model=./no-such-teacher")
