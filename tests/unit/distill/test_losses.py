"""Every divergence, its gradient and its chunks, against an oracle from the definitions."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tessera_cli.distill.losses import chunked
from tessera_cli.distill.losses import dense as losses
from tessera_cli.distill.losses.dense import chunked_distillation_loss
from tessera_cli.recipe.schema import LossSection
from tests.unit.distill.loss_oracle import KINDS, TOKENS, VOCAB, gradients, make_inputs, oracle, section


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("kd_weight", "ce_weight"), [(1.0, 0.0), (0.7, 0.4), (0.0, 1.0)])
def test_loss_and_gradient_equal_the_definition(
    kind: str, temperature: float, kd_weight: float, ce_weight: float
) -> None:
    asked = section(kind, temperature=temperature, kd_weight=kd_weight, ce_weight=ce_weight)
    inputs = make_inputs()
    exact = [inputs[name].detach().double().requires_grad_() for name in ("student_hidden", "student_head")]
    expected = oracle(asked, inputs, *exact)
    sums = chunked_distillation_loss(**inputs, loss=asked, chunk_tokens=4)
    torch.testing.assert_close(sums.loss.double(), expected, rtol=2e-6, atol=0.0)
    expected_gradients = torch.autograd.grad(expected / TOKENS, exact)
    for gradient, correct in zip(gradients(inputs, asked, 4), expected_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), correct, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_gradient_equals_finite_differences_of_the_definition(kind: str, temperature: float) -> None:
    asked = section(kind, temperature=temperature, ce_weight=0.5)
    inputs = make_inputs(1)
    hidden, head = inputs["student_hidden"].detach().double(), inputs["student_head"].detach().double()
    hidden_gradient, head_gradient = gradients(inputs, asked, 4)
    generator = torch.Generator().manual_seed(2)
    d_hidden = torch.randn(hidden.shape, generator=generator, dtype=torch.float64)
    d_head = torch.randn(head.shape, generator=generator, dtype=torch.float64)
    eps = 1e-6
    ahead = oracle(asked, inputs, hidden + eps * d_hidden, head + eps * d_head)
    behind = oracle(asked, inputs, hidden - eps * d_hidden, head - eps * d_head)
    slope = (hidden_gradient.double() * d_hidden).sum() + (head_gradient.double() * d_head).sum()
    torch.testing.assert_close(slope, (ahead - behind) / (2 * eps) / TOKENS, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 256])
def test_the_chunk_size_changes_nothing(kind: str, chunk_tokens: int) -> None:
    asked = section(kind, temperature=2.0, ce_weight=0.5)
    inputs = make_inputs()
    whole = chunked_distillation_loss(**inputs, loss=asked, chunk_tokens=TOKENS)
    chunked = chunked_distillation_loss(**inputs, loss=asked, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(tuple(chunked), tuple(whole), rtol=1e-6, atol=1e-6)
    for left, right in zip(
        gradients(inputs, asked, chunk_tokens), gradients(inputs, asked, TOKENS), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_and_blocks_of_a_chunk_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, asked = make_inputs(), section(kind, temperature=2.0, ce_weight=0.5)
    whole = gradients(inputs, asked, chunk_tokens=7)
    monkeypatch.setattr(chunked, "_CPU_TILE", 8)
    monkeypatch.setattr(chunked, "_CPU_BLOCK", 3)
    for left, right in zip(gradients(inputs, asked, chunk_tokens=7), whole, strict=True):
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
    inputs = make_inputs()
    same = {
        "teacher_hidden": inputs["student_hidden"].detach(),
        "teacher_head": inputs["student_head"].detach(),
    }
    asked = section(kind, temperature=temperature)
    sums = chunked_distillation_loss(**(inputs | same), loss=asked, chunk_tokens=4)
    # A mixture rounds; a plain divergence of equal numbers does not.
    assert abs(sums.kd.item()) <= (1e-5 if asked.mixture_weight else 0.0)
    for gradient in gradients(inputs | same, asked, 4):
        assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("measure", [losses.jsd, losses.skew_kl, losses.skew_reverse_kl])
@pytest.mark.parametrize("weight", [0.0, 1.0, -0.1])
def test_a_mixture_of_one_part_is_refused(measure: Any, weight: float) -> None:
    log_probabilities = torch.zeros(1, 3).log_softmax(-1)
    with pytest.raises(ValueError, match="mixture_weight must be between 0 and 1"):
        partial(measure, mixture_weight=weight)(log_probabilities, log_probabilities)


def test_a_tied_head_has_the_gradient_of_both_uses() -> None:
    inputs = make_inputs()
    table = inputs["student_head"]
    ids = torch.arange(TOKENS)
    tied = inputs | {"student_hidden": table[ids].tanh()}
    sums = chunked_distillation_loss(**tied, loss=LossSection(), chunk_tokens=4)
    (gradient,) = torch.autograd.grad(sums.loss, table)
    exact = table.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(oracle(LossSection(), inputs, exact[ids].tanh(), exact), exact)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-5)


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in (result,) if isinstance(t, Tensor))])
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_holds_the_logits_of_more_than_a_chunk(kind: str) -> None:
    inputs = make_inputs()
    with _LargestTensor() as largest:
        sums = chunked_distillation_loss(**inputs, loss=section(kind, ce_weight=0.5), chunk_tokens=7)
        sums.loss.backward()
    assert largest.numel == 7 * VOCAB


@pytest.mark.parametrize(
    ("name", "message"), [("teacher_head", "vocabularies differ"), ("target_ids", "same positions")]
)
def test_shapes_that_disagree_are_refused(name: str, message: str) -> None:
    inputs = make_inputs()
    with pytest.raises(ValueError, match=message):
        chunked_distillation_loss(**(inputs | {name: inputs[name][:-1]}), loss=LossSection(), chunk_tokens=4)
