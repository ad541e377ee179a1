"""The oracle is written from the definitions: probabilities in float64, one product after the other."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tessera_cli.distill import losses
from tessera_cli.distill.losses import chunked_distillation_loss, divergence
from tessera_cli.recipe.schema import LossSection

KINDS = ["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd"]
WEIGHT = 0.3  # of the teacher in a mixture; not 0.5, where swapped shares go unseen
TOKENS, VOCAB, HIDDEN, TEACHER_HIDDEN = 11, 37, 6, 5


def _section(kind: str, **keys: Any) -> LossSection:
    mixture = {"mixture_weight": WEIGHT} if kind in ("jsd", "skew_kl", "skew_reverse_kl") else {}
    return LossSection(kind=kind, **mixture, **keys)


def _oracle_divergence(kind: str, p: Tensor, q: Tensor) -> Tensor:
    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    mixture = WEIGHT * p + (1 - WEIGHT) * q
    if kind == "forward_kl":
        return kl(p, q)
    if kind == "reverse_kl":
        return kl(q, p)
    if kind == "jsd":
        return WEIGHT * kl(p, mixture) + (1 - WEIGHT) * kl(q, mixture)
    if kind == "skew_kl":
        return kl(p, mixture)
    if kind == "skew_reverse_kl":
        return kl(q, mixture)
    return (p - q).abs().sum(-1) / 2


def _oracle(section: LossSection, inputs: dict[str, Tensor], hidden: Tensor, head: Tensor) -> Tensor:
    """The whole loss over all logits at once; `hidden` and `head` are the student's, float64."""
    logits = hidden @ head.T
    teacher_logits = inputs["teacher_hidden"].double() @ inputs["teacher_head"].double().T
    p = (teacher_logits / section.temperature).softmax(-1)
    q = (logits / section.temperature).softmax(-1)
    kd = _oracle_divergence(section.kind, p, q).sum()
    ce = -logits.softmax(-1)[torch.arange(len(hidden)), inputs["target_ids"]].log().sum()
    return section.kd_weight * section.temperature**2 * kd + section.ce_weight * ce


def _inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "student_hidden": torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_(),
        "student_head": torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_(),
        "teacher_hidden": torch.randn(TOKENS, TEACHER_HIDDEN, generator=generator),
        "teacher_head": torch.randn(VOCAB, TEACHER_HIDDEN, generator=generator),
        "target_ids": torch.randint(0, VOCAB, (TOKENS,), generator=generator),
    }


def _gradients(inputs: dict[str, Tensor], section: LossSection, chunk_tokens: int) -> tuple[Tensor, ...]:
    sums = chunked_distillation_loss(**inputs, loss=section, chunk_tokens=chunk_tokens)
    return torch.autograd.grad(sums.loss / TOKENS, [inputs["student_hidden"], inputs["student_head"]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("kd_weight", "ce_weight"), [(1.0, 0.0), (0.7, 0.4), (0.0, 1.0)])
def test_loss_and_gradient_equal_the_definition(
    kind: str, temperature: float, kd_weight: float, ce_weight: float
) -> None:
    section = _section(kind, temperature=temperature, kd_weight=kd_weight, ce_weight=ce_weight)
    inputs = _inputs()
    exact = [inputs[name].detach().double().requires_grad_() for name in ("student_hidden", "student_head")]
    expected = _oracle(section, inputs, *exact)
    sums = chunked_distillation_loss(**inputs, loss=section, chunk_tokens=4)
    torch.testing.assert_close(sums.loss.double(), expected, rtol=2e-6, atol=0.0)
    expected_gradients = torch.autograd.grad(expected / TOKENS, exact)
    for gradient, correct in zip(_gradients(inputs, section, 4), expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), correct, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gradient_equals_finite_differences_of_the_definition(kind: str, temperature: float) -> None:
    section = _section(kind, temperature=temperature, ce_weight=0.5)
    inputs = _inputs(1)
    hidden, head = inputs["student_hidden"].detach().double(), inputs["student_head"].detach().double()
    hidden_gradient, head_gradient = _gradients(inputs, section, 4)
    generator = torch.Generator().manual_seed(2)
    d_hidden = torch.randn(hidden.shape, generator=generator, dtype=torch.float64)
    d_head = torch.randn(head.shape, generator=generator, dtype=torch.float64)
    eps = 1e-6
    ahead = _oracle(section, inputs, hidden + eps * d_hidden, head + eps * d_head)
    behind = _oracle(section, inputs, hidden - eps * d_hidden, head - eps * d_head)
    slope = (hidden_gradient.double() * d_hidden).sum() + (head_gradient.double() * d_head).sum()
    torch.testing.assert_close(slope, (ahead - behind) / (2 * eps) / TOKENS, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 256])
def test_the_chunk_size_changes_nothing(kind: str, chunk_tokens: int) -> None:
    section = _section(kind, temperature=2.0, ce_weight=0.5)
    inputs = _inputs()
    whole = chunked_distillation_loss(**inputs, loss=section, chunk_tokens=TOKENS)
    chunked = chunked_distillation_loss(**inputs, loss=section, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(tuple(chunked), tuple(whole), rtol=1e-6, atol=1e-6)
    for left, right in zip(
        _gradients(inputs, section, chunk_tokens), _gradients(inputs, section, TOKENS), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("ce_weight", [0.0, 0.5])
def test_the_closed_form_equals_autograd(temperature: float, ce_weight: float) -> None:
    section = LossSection(temperature=temperature, kd_weight=0.7, ce_weight=ce_weight)
    generator = torch.Generator().manual_seed(3)
    logits, teacher_logits = torch.randn(2, TOKENS, VOCAB, generator=generator) * 4
    target_ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    closed = losses._closed_form_forward_kl(logits.clone(), teacher_logits.clone(), target_ids, loss=section)
    plain = losses._by_autograd(logits, teacher_logits, target_ids, loss=section)
    for left, right in zip(closed, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_student_that_equals_its_teacher_has_nothing_to_learn(kind: str, temperature: float) -> None:
    inputs = _inputs()
    same = {
        "teacher_hidden": inputs["student_hidden"].detach(),
        "teacher_head": inputs["student_head"].detach(),
    }
    section = _section(kind, temperature=temperature)
    sums = chunked_distillation_loss(**(inputs | same), loss=section, chunk_tokens=4)
    # A mixture rounds; a plain divergence of equal numbers does not.
    assert abs(sums.kd.item()) <= (1e-5 if section.mixture_weight else 0.0)
    for gradient in _gradients(inputs | same, section, 4):
        assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_logits_have_finite_gradients(kind: str) -> None:
    teacher_logits = torch.tensor([[80.0, -80.0, 0.0], [-80.0, 80.0, 80.0], [0.0, 0.0, 0.0]])
    logits = torch.tensor([[-80.0, 80.0, 0.0], [80.0, -80.0, 80.0], [80.0, -80.0, -80.0]]).requires_grad_()
    loss = divergence(_section(kind))(teacher_logits.log_softmax(-1), logits.log_softmax(-1))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    exact = logits.detach().double().requires_grad_()
    expected = divergence(_section(kind))(teacher_logits.double().log_softmax(-1), exact.log_softmax(-1))
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_words_that_neither_model_has_do_not_count(kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    teacher_logits, logits = torch.randn(2, TOKENS, VOCAB, generator=generator)
    measure = divergence(_section(kind))
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


@pytest.mark.parametrize("measure", [losses.jsd, losses.skew_kl, losses.skew_reverse_kl])
@pytest.mark.parametrize("weight", [0.0, 1.0, -0.1])
def test_a_mixture_of_one_part_is_refused(measure: Any, weight: float) -> None:
    log_probabilities = torch.zeros(1, 3).log_softmax(-1)
    with pytest.raises(ValueError, match="mixture_weight must be between 0 and 1"):
        partial(measure, mixture_weight=weight)(log_probabilities, log_probabilities)


def test_a_tied_head_has_the_gradient_of_both_uses() -> None:
    inputs = _inputs()
    table = inputs["student_head"]
    ids = torch.arange(TOKENS)
    tied = inputs | {"student_hidden": table[ids].tanh()}
    sums = chunked_distillation_loss(**tied, loss=LossSection(), chunk_tokens=4)
    (gradient,) = torch.autograd.grad(sums.loss, table)
    exact = table.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(_oracle(LossSection(), inputs, exact[ids].tanh(), exact), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
def test_logits_are_projected_in_float32_whatever_the_models_compute_in(kind: str) -> None:
    low = {name: t.bfloat16() if t.is_floating_point() else t for name, t in _inputs().items()}
    high = {name: t.float() if t.is_floating_point() else t for name, t in low.items()}
    section = _section(kind)
    expected = chunked_distillation_loss(**high, loss=section, chunk_tokens=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sums = chunked_distillation_loss(**low, loss=section, chunk_tokens=4)
    assert torch.equal(sums.loss, expected.loss)


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in (result,) if isinstance(t, Tensor))])
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_holds_the_logits_of_more_than_a_chunk(kind: str) -> None:
    inputs = _inputs()
    with _LargestTensor() as largest:
        sums = chunked_distillation_loss(**inputs, loss=_section(kind, ce_weight=0.5), chunk_tokens=7)
        sums.loss.backward()
    assert largest.numel == 7 * VOCAB


def test_no_supervised_token_is_a_loss_of_zero() -> None:
    inputs = {name: t[:0] if len(t) == TOKENS else t for name, t in _inputs().items()}
    sums = chunked_distillation_loss(**inputs, loss=LossSection(), chunk_tokens=4)
    assert [value.item() for value in sums] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("name", "message"), [("teacher_head", "vocabularies differ"), ("target_ids", "same positions")]
)
def test_shapes_that_disagree_are_refused(name: str, message: str) -> None:
    inputs = _inputs()
    with pytest.raises(ValueError, match=message):
        chunked_distillation_loss(**(inputs | {name: inputs[name][:-1]}), loss=LossSection(), chunk_tokens=4)
