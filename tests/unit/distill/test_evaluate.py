"""The figures of a student, against an independent computation and against what must hold."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera_cli.distill.data.corpus import Document
from tessera_cli.distill.evaluation.evaluate import Evaluator, held_out_batches
from tessera_cli.distill.students.student import build_student
from tessera_cli.errors import ModelError
from tessera_cli.kernels.packed import PackedAttention
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    random = np.random.default_rng(1)
    documents = []
    for length in random.integers(3, 25, 9):
        supervised = random.random(length) < 0.6
        supervised[0], supervised[-1] = False, True
        documents.append(Document(random.integers(3, 300, length).astype(np.int32), supervised))
    return documents


@pytest.fixture(scope="module")
def teacher(tiny_model_dir: Path) -> Decoder:
    return load_decoder(tiny_model_dir, dtype=torch.float32)


def evaluator(teacher, documents, *, chunk_tokens=16, rows_per_batch=2) -> Evaluator:
    batches = held_out_batches(documents, max_targets=10**6, max_seq_len=40, rows_per_batch=rows_per_batch)
    return Evaluator(teacher, batches, chunk_tokens=chunk_tokens)


@torch.no_grad()
def one_by_one(teacher: Decoder, student: Decoder, documents: list[Document]) -> list[float]:
    """KL, negative log-likelihoods, agreements, overlap: a document at a time, in float64 probabilities."""
    rows = []
    for document in documents:
        ids = torch.from_numpy(document.token_ids.astype(np.int64))
        positions = torch.arange(len(ids))
        p, q = (
            torch.softmax(model.logits(model(ids, positions, attention.attend)).double(), -1)
            for model in (teacher, student)
            for attention in [PackedAttention([0, len(ids)], model.attention_layers)]
        )
        for place in np.flatnonzero(document.supervised):
            a, b, target = p[place - 1], q[place - 1], ids[place]
            rows.append(
                (
                    float((a * (a / b).log()).sum()),
                    -math.log(a[target]),
                    -math.log(b[target]),
                    float(a.argmax() == b.argmax()),
                    float((b > b[a.argmax()]).sum() < 5),
                    1 - 0.5 * float((a - b).abs().sum()),
                )
            )
    return np.mean(rows, axis=0).tolist()


def test_figures_equal_an_independent_computation(teacher, documents):
    student = build_student(teacher, [0, 2])
    kl, teacher_nll, student_nll, top1, top5, acceptance = one_by_one(teacher, student, documents)
    figures = evaluator(teacher, documents).evaluate(student, step=5)
    assert figures.step == 5
    assert figures.num_tokens == sum(document.num_supervised_tokens for document in documents)
    assert figures.kl == pytest.approx(kl, rel=1e-4)
    assert figures.cross_entropy == pytest.approx(student_nll, rel=1e-5)
    assert figures.student_perplexity == pytest.approx(math.exp(student_nll), rel=1e-4)
    assert figures.teacher_perplexity == pytest.approx(math.exp(teacher_nll), rel=1e-4)
    assert figures.top1_agreement == pytest.approx(top1)
    assert figures.top5_agreement == pytest.approx(top5)
    assert 0 < figures.top1_agreement < figures.top5_agreement < 1
    assert figures.acceptance == pytest.approx(acceptance, rel=1e-4)


def test_the_teacher_agrees_with_itself(teacher, documents):
    figures = evaluator(teacher, documents).evaluate(build_student(teacher, [0, 1, 2]), step=0)
    assert figures.kl == 0
    assert figures.top1_agreement == figures.top5_agreement == 1
    assert figures.acceptance == pytest.approx(1, abs=1e-6)
    assert figures.student_perplexity == figures.teacher_perplexity


def test_neither_chunks_nor_batches_nor_a_second_evaluation_change_the_figures(teacher, documents):
    student = build_student(teacher, [0, 2])
    reference = evaluator(teacher, documents)
    first = reference.evaluate(student, step=0)
    assert reference.evaluate(student, step=0) == first
    for chunk_tokens, rows_per_batch in ((1, 1), (7, 100), (1000, 3)):
        figures = evaluator(teacher, documents, chunk_tokens=chunk_tokens, rows_per_batch=rows_per_batch)
        assert vars(figures.evaluate(student, step=0)) == pytest.approx(vars(first), rel=1e-5)


def test_later_evaluations_need_no_teacher_pass(teacher, documents, monkeypatch):
    student = build_student(teacher, [0, 2])
    reference = evaluator(teacher, documents)
    first = reference.evaluate(student, step=0)
    monkeypatch.setattr(teacher, "forward", None)
    assert reference.evaluate(student, step=0) == first


@pytest.mark.parametrize("whose", ["student", "teacher"])
def test_logits_that_are_not_finite_are_no_figures(teacher, documents, whose):
    models = {"teacher": copy.deepcopy(teacher), "student": copy.deepcopy(teacher)}
    torch.nn.init.constant_(models[whose].norm.weight, torch.nan)
    with pytest.raises(ModelError, match=f"the {whose}'s logits on the held-out documents are not finite"):
        evaluator(models["teacher"], documents).evaluate(models["student"], step=0)


def test_the_held_out_subset_is_whole_documents_up_to_the_limit(documents):
    def targets(limit: int) -> int:
        batches = held_out_batches(documents, max_targets=limit, max_seq_len=40, rows_per_batch=2)
        return sum(len(batch.target_ids) for batch in batches)

    total = sum(document.num_supervised_tokens for document in documents)
    counts = [targets(limit) for limit in range(1, total + 2)]
    assert counts[-1] == counts[-2] == total
    assert counts == sorted(counts)
    first = counts[0]
    assert all(count <= max(limit, first) for limit, count in enumerate(counts, start=1))
    assert set(counts) - {first, total}
