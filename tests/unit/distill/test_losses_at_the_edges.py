"""Extreme logits, absent words, scaled and capped logits, narrow types: where a loss breaks first."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tessera_cli.distill.data.corpus import Document, build_batch
from tessera_cli.distill.evaluation.evaluate import Evaluator
from tessera_cli.distill.losses import dense as losses
from tessera_cli.distill.losses.dense import chunked_distillation_loss, divergence
from tessera_cli.models.loader import load_decoder
from tessera_cli.recipe.schema import LossSection
from tests.families import random_tokens, transformers_model, write_family
from tests.training_factories import make_trainer
from tests.unit.distill.loss_oracle import (
    KINDS,
    TOKENS,
    VOCAB,
    WEIGHT,
    make_inputs,
    oracle,
    section,
)


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits_have_finite_gradients(kind: str) -> None:
    teacher_logits = torch.tensor([[80.0, -80.0, 0.0], [-80.0, 80.0, 80.0], [0.0, 0.0, 0.0]])
    logits = torch.tensor([[-80.0, 80.0, 0.0], [80.0, -80.0, 80.0], [80.0, -80.0, -80.0]]).requires_grad_()
    loss = divergence(section(kind))(teacher_logits.log_softmax(-1), logits.log_softmax(-1))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    exact = logits.detach().double().requires_grad_()
    expected = divergence(section(kind))(teacher_logits.double().log_softmax(-1), exact.log_softmax(-1))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_extreme_logits_through_the_head_have_finite_gradients(kind: str, temperature: float) -> None:
    """Hidden states and heads whose products are 80, 0 and -80, sure of the same and of different words."""
    words = torch.eye(4)[:3] * 80
    inputs = {
        "student_hidden": words[[0, 1, 2, 0]].clone().requires_grad_(),
        "student_head": torch.cat([torch.eye(4), -torch.eye(4)]).requires_grad_(),
        "teacher_hidden": words[[0, 2, 1, 0]] * torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None],
        "teacher_head": torch.cat([torch.eye(4), -torch.eye(4)]),
        "target_ids": torch.tensor([0, 4, 6, 4]),
    }
    asked = section(kind, temperature=temperature, ce_weight=0.5)
    sums = chunked_distillation_loss(**inputs, loss=asked, chunk_tokens=3)
    found = torch.autograd.grad(sums.loss, [inputs["student_hidden"], inputs["student_head"]])
    assert all(value.isfinite().all() for value in (*sums, *found))
    exact = [inputs[name].detach().double().requires_grad_() for name in ("student_hidden", "student_head")]
    logits = exact[0] @ exact[1].T
    teacher_logits = inputs["teacher_hidden"].double() @ inputs["teacher_head"].double().T
    log_p, log_q = ((x / temperature).log_softmax(-1) for x in (teacher_logits, logits))
    # In logarithms, unlike the oracle, and in float64: e^-640 is a number there that log can give back.
    mixture = torch.logaddexp(log_p + math.log(WEIGHT), log_q + math.log(1 - WEIGHT))
    pairs = {
        "forward_kl": [(1, log_p, log_q)],
        "reverse_kl": [(1, log_q, log_p)],
        "jsd": [(WEIGHT, log_p, mixture), (1 - WEIGHT, log_q, mixture)],
        "skew_kl": [(1, log_p, mixture)],
        "skew_reverse_kl": [(1, log_q, mixture)],
    }
    terms = [weight * (a.exp() * (a - b)).sum() for weight, a, b in pairs.get(kind, [])]
    kd = sum(terms) if terms else (log_p.exp() - log_q.exp()).abs().sum() / 2
    ce = -logits.log_softmax(-1)[torch.arange(4), inputs["target_ids"]].sum()
    expected = temperature**2 * kd + 0.5 * ce
    torch.testing.assert_close(sums.loss.double(), expected, rtol=1e-5, atol=1e-5)
    for gradient, correct in zip(found, torch.autograd.grad(expected, exact), strict=True):
        torch.testing.assert_close(gradient.double(), correct, rtol=1e-4, atol=1e-4)


# Without the two that are infinite by definition.
@pytest.mark.parametrize(
    ("kind", "lacks"),
    [
        *((kind, "teacher") for kind in KINDS if kind != "reverse_kl"),
        *((kind, "student") for kind in KINDS if kind != "forward_kl"),
    ],
)
def test_words_that_one_model_lacks_leave_finite_gradients_where_they_cost_a_finite_amount(
    kind: str, lacks: str
) -> None:
    generator = torch.Generator().manual_seed(5)
    teacher_logits, logits = torch.randn(2, TOKENS, VOCAB, generator=generator)
    (teacher_logits if lacks == "teacher" else logits)[:, 3:6] = -math.inf
    logits.requires_grad_()
    loss = divergence(section(kind))(teacher_logits.log_softmax(-1), logits.log_softmax(-1))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    p, exact = teacher_logits.double().softmax(-1), logits.detach().double().requires_grad_()
    q = exact.softmax(-1)
    tiny = 1e-300  # x log x is 0 at 0, and so is its limit
    mixture = WEIGHT * p + (1 - WEIGHT) * q
    kl = {
        "forward_kl": lambda: p * ((p + tiny) / q).log(),
        "reverse_kl": lambda: q * ((q + tiny) / p).log(),
        "jsd": lambda: (
            WEIGHT * p * ((p + tiny) / mixture).log() + (1 - WEIGHT) * q * ((q + tiny) / mixture).log()
        ),
        "skew_kl": lambda: p * ((p + tiny) / mixture).log(),
        "skew_reverse_kl": lambda: q * ((q + tiny) / mixture).log(),
        "tvd": lambda: (p - q).abs() / 2,
    }[kind]()
    torch.testing.assert_close(loss.double(), kl.sum(-1), rtol=1e-5, atol=1e-6)
    (expected,) = torch.autograd.grad(kl.sum(), exact)
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "caps",
    [{"student_soft_cap": 2.0}, {"teacher_soft_cap": 1.5}, {"student_soft_cap": 3, "teacher_soft_cap": 2}],
)
def test_soft_caps_are_part_of_the_logits(kind: str, caps: dict[str, float]) -> None:
    asked = section(kind, temperature=2.0, ce_weight=0.5)
    inputs = make_inputs()
    exact = [inputs[name].detach().double().requires_grad_() for name in ("student_hidden", "student_head")]
    expected = oracle(asked, inputs, *exact, **caps)
    sums = chunked_distillation_loss(**inputs, loss=asked, chunk_tokens=4, **caps)
    torch.testing.assert_close(sums.loss.double(), expected, rtol=2e-6, atol=0.0)
    found = torch.autograd.grad(sums.loss, [inputs["student_hidden"], inputs["student_head"]])
    for gradient, correct in zip(found, torch.autograd.grad(expected, exact), strict=True):
        torch.testing.assert_close(gradient.double(), correct, rtol=1e-4, atol=1e-5)


def test_scaled_logits_are_what_is_compared(tmp_path: Path) -> None:
    """Granite divides its logits: loss and figures are of what transformers' own model gives."""
    teacher_dir, student_dir = (tmp_path / name for name in ("teacher", "student"))
    write_family("granite", teacher_dir)
    write_family("granite", student_dir, logits_scaling=3.0)
    teacher, student = (load_decoder(path, dtype=torch.float32) for path in (teacher_dir, student_dir))
    token_ids = np.array(random_tokens(20), dtype=np.int32)
    document = Document(token_ids, np.arange(20) > 0)
    ids = torch.tensor(token_ids.tolist())[None]
    with torch.no_grad():
        log_p, log_q = (
            transformers_model(path)(ids).logits[0, :-1].double().log_softmax(-1)
            for path in (teacher_dir, student_dir)
        )
    expected = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    batch = build_batch([document])
    evaluated = Evaluator(teacher, [batch], chunk_tokens=7).evaluate(student, step=0)
    assert evaluated.kl == pytest.approx(expected, rel=1e-4)
    figures = make_trainer(student, teacher).train_step([batch])
    assert figures is not None
    assert figures.kd_loss == pytest.approx(expected, rel=1e-4)
    assert expected > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_words_that_neither_model_has_do_not_count(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    teacher_logits, logits = torch.randn(2, TOKENS, VOCAB, generator=generator)
    measure = divergence(section(kind))
    short = logits.clone().requires_grad_()
    expected = measure(teacher_logits.log_softmax(-1), short.log_softmax(-1))
    absent = torch.full((TOKENS, 3), float("-inf"))
    long = torch.cat([logits, absent], -1).requires_grad_()
    loss = measure(torch.cat([teacher_logits, absent], -1).log_softmax(-1), long.log_softmax(-1))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), short)
    (gradient,) = torch.autograd.grad(loss.sum(), long)
    torch.testing.assert_close(gradient[:, :VOCAB], expected_gradient, rtol=1e-5, atol=1e-6)
    assert gradient[:, VOCAB:].count_nonzero() == 0


def test_a_word_that_only_the_student_lacks_costs_infinitely_much() -> None:
    teacher = torch.tensor([[0.5, 0.5]]).log()
    student = torch.tensor([[1.0, 0.0]]).log()
    assert losses.forward_kl(teacher, student).isposinf().all()
    assert losses.reverse_kl(teacher, student).item() == pytest.approx(0.6931, abs=1e-4)
    assert losses.tvd(teacher, student).item() == 0.5


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_logits_are_projected_in_float32_whatever_the_models_compute_in(kind: str) -> None:
    low = {name: t.bfloat16() if t.is_floating_point() else t for name, t in make_inputs().items()}
    high = {name: t.float() if t.is_floating_point() else t for name, t in low.items()}
    asked = section(kind)
    expected = chunked_distillation_loss(**high, loss=asked, chunk_tokens=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = chunked_distillation_loss(**low, loss=asked, chunk_tokens=4)
    assert torch.equal(sums.loss, expected.loss)


def test_no_supervised_token_is_a_loss_of_zero() -> None:
    inputs = {name: t[:0] if len(t) == TOKENS else t for name, t in make_inputs().items()}
    sums = chunked_distillation_loss(**inputs, loss=LossSection(), chunk_tokens=4)
    assert [value.item() for value in sums] == [0.0, 0.0, 0.0]
