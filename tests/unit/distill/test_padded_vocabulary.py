"""Models of one tokenizer, padded to vocabularies of other sizes: what is beyond the ids is not there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tessera_cli.distill.evaluation.measured import Measured
from tessera_cli.distill.evaluation.pair import evaluate_pair
from tessera_cli.distill.pipeline import run_recipe
from tessera_cli.distill.plan import plan_recipe
from tessera_cli.errors import ModelError
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.loader import load_decoder
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.models.vocabulary import load_first_rows
from tessera_cli.recipe.data_section import DataSource
from tessera_cli.recipe.loader import load_recipe
from tests.training_factories import assert_same_bits


def with_rows(model: Path, target: Path, num_rows: int) -> Path:
    """A copy of `model` with `num_rows` vocabulary rows; those beyond its own make logits that would win."""
    target.mkdir()
    for file in model.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    raw = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(raw | {"vocab_size": num_rows}))
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            extra = 5 * torch.randn(max(0, num_rows - len(tensor)), tensor.shape[1])
            tensors[name] = torch.cat([tensor, extra])[:num_rows].clone()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def write_documents(path: Path, who: str) -> Path:
    rows = [{"text": f"The capital of France is Paris, the {who} {i} says."} for i in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(tmp_path: Path):
    """Distils the checkpoint `student` from `teacher`; the result, and the notes."""
    train = write_documents(tmp_path / "train.jsonl", "robot")
    held_out = write_documents(tmp_path / "eval.jsonl", "fox")

    def run(teacher: Path, student: Path, *overrides: str):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(
            f"""
name: tiny
teacher: {{model: {teacher}}}
student: {{init: checkpoint, model: {student}}}
data:
  train: [{{path: {train}, format: text}}]
  eval: [{{path: {held_out}, format: text}}]
  max_seq_len: 64
  train_on: all
train: {{max_steps: 3, micro_batch_size: 1}}
eval: {{samples: 1}}
"""
        )
        loaded = load_recipe(recipe, overrides)
        plan = plan_recipe(loaded, home=tmp_path, offline=True)
        result = run_recipe(
            loaded,
            run_dir=tmp_path / f"run-{teacher.name}-{student.name}",
            listener=lambda event: None,
            resume=False,
            overwrite=True,
            device="cpu",
            offline=True,
            home=tmp_path,
        )
        return result, plan.notes

    return run


CACHES = ["none", "hidden", "topk"]


@pytest.mark.parametrize("cache", CACHES)
def test_padded_models_train_as_if_they_were_not_padded(
    cache: str, run, tiny_model_dir: Path, tiny_untied_model_dir: Path, tmp_path: Path
) -> None:
    num_ids = Tokenizer.from_dir(tiny_model_dir).num_ids
    tied = with_rows(tiny_model_dir, tmp_path / "tied", num_ids + 50)
    untied = with_rows(tiny_untied_model_dir, tmp_path / "untied", num_ids + 7)
    override = f"teacher.cache.kind={cache}"
    plain, notes = run(tiny_model_dir, tiny_untied_model_dir, override)
    assert not notes
    for teacher, student in ((tied, tiny_untied_model_dir), (tiny_model_dir, untied), (tied, untied)):
        padded, notes = run(teacher, student, override)
        assert f"cut to the tokenizer's {num_ids} ids" in notes[0]
        assert_same_bits(*(load_file(one.export / "model.safetensors") for one in (plain, padded)))
        assert (padded.start, padded.end) == (plain.start, plain.end)
        assert ModelConfig.from_dir(padded.export).vocab_size == num_ids


def test_models_with_as_many_rows_keep_their_padding(
    run, tiny_model_dir: Path, tiny_untied_model_dir: Path, tmp_path: Path
) -> None:
    teacher = with_rows(tiny_model_dir, tmp_path / "tied", 400)
    student = with_rows(tiny_untied_model_dir, tmp_path / "untied", 400)
    result, notes = run(teacher, student)
    assert not notes
    assert ModelConfig.from_dir(result.export).vocab_size == 400


def test_a_student_with_fewer_rows_than_ids_is_refused_with_both_numbers(
    run, tiny_model_dir: Path, tiny_untied_model_dir: Path, tmp_path: Path
) -> None:
    num_ids = Tokenizer.from_dir(tiny_model_dir).num_ids
    short = with_rows(tiny_untied_model_dir, tmp_path / "short", num_ids - 1)
    with pytest.raises(ModelError, match=f"{num_ids - 1} vocabulary rows, its tokenizer {num_ids} ids") as e:
        run(tiny_model_dir, short)
    assert "resize_token_embeddings" in (e.value.hint or "")


@torch.no_grad()
@pytest.mark.parametrize("which", ["tiny_model_dir", "tiny_untied_model_dir"])
def test_the_first_rows_give_the_first_logits(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)
    whole = load_decoder(path, dtype=torch.float32)
    cut = load_first_rows(path, 100, dtype=torch.float32)
    hidden = torch.randn(5, whole.config.hidden_size)
    assert torch.equal(cut.logits(hidden), whole.logits(hidden)[:, :100])
    assert (cut.lm_head is None) == (whole.lm_head is None)
    assert cut.config.num_parameters == sum(parameter.numel() for parameter in cut.parameters())
    with pytest.raises(ValueError, match="rows of"):
        load_first_rows(path, whole.config.vocab_size + 1, dtype=torch.float32)


def test_any_two_models_of_one_tokenizer_are_measured_in_its_ids(
    tiny_model_dir: Path, tiny_untied_model_dir: Path, tmp_path: Path
) -> None:
    documents = write_documents(tmp_path / "data.jsonl", "robot")

    def figures(teacher: Path, student: Path):
        return measured(teacher, student, documents, home=tmp_path).student

    plain = figures(tiny_model_dir, tiny_untied_model_dir)
    padded = with_rows(tiny_untied_model_dir, tmp_path / "untied", 999)
    assert figures(tiny_model_dir, padded) == plain
    assert plain.kl > 0
    assert figures(padded, padded).kl == 0


def test_a_pair_of_which_one_has_fewer_rows_than_ids_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "data.jsonl", "robot")
    short = with_rows(tiny_model_dir, tmp_path / "short", Tokenizer.from_dir(tiny_model_dir).num_ids - 1)
    for teacher, student in ((short, short), (short, tiny_model_dir), (tiny_model_dir, short)):
        with pytest.raises(ModelError, match="vocabulary rows, its tokenizer"):
            measured(teacher, student, documents, home=tmp_path)


def measured(teacher: Path, student: Path, documents: Path, *, home: Path) -> Measured:
    return evaluate_pair(
        str(teacher),
        str(student),
        [DataSource(path=str(documents), format="text")],
        limit=10_000,
        max_seq_len=64,
        train_on="all",
        device="cpu",
        home=home,
        offline=True,
    )
