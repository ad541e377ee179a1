"""The losses from their definitions: probabilities in float64, one product after the other."""

import math
from typing import Any

import torch
from torch import Tensor

from tessera_cli.distill.losses.dense import chunked_distillation_loss
from tessera_cli.recipe.schema import LossSection

KINDS = ["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd"]
WEIGHT = 0.3  # of the teacher in a mixture; not 0.5, where swapped shares go unseen
TOKENS, VOCAB, HIDDEN, TEACHER_HIDDEN = 11, 37, 6, 5


def section(kind: str, **keys: Any) -> LossSection:
    mixture = {"mixture_weight": WEIGHT} if kind in ("jsd", "skew_kl", "skew_reverse_kl") else {}
    return LossSection(kind=kind, **mixture, **keys)


def oracle_divergence(kind: str, p: Tensor, q: Tensor) -> Tensor:
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


def oracle(
    section: LossSection,
    inputs: dict[str, Tensor],
    hidden: Tensor,
    head: Tensor,
    *,
    student_soft_cap: float = math.inf,
    teacher_soft_cap: float = math.inf,
) -> Tensor:
    """The whole loss over all logits at once; `hidden` and `head` are the student's, float64."""

    def capped(products: Tensor, cap: float) -> Tensor:
        return products if math.isinf(cap) else cap * torch.tanh(products / cap)

    logits = capped(hidden @ head.T, student_soft_cap)
    teacher_logits = inputs["teacher_hidden"].double() @ inputs["teacher_head"].double().T
    teacher_logits = capped(teacher_logits, teacher_soft_cap)
    p = (teacher_logits / section.temperature).softmax(-1)
    q = (logits / section.temperature).softmax(-1)
    kd = oracle_divergence(section.kind, p, q).sum()
    ce = -logits.softmax(-1)[torch.arange(len(hidden)), inputs["target_ids"]].log().sum()
    return section.kd_weight * section.temperature**2 * kd + section.ce_weight * ce


def make_inputs(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "student_hidden": torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_(),
        "student_head": torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_(),
        "teacher_hidden": torch.randn(TOKENS, TEACHER_HIDDEN, generator=generator),
        "teacher_head": torch.randn(VOCAB, TEACHER_HIDDEN, generator=generator),
        "target_ids": torch.randint(0, VOCAB, (TOKENS,), generator=generator),
    }


def gradients(inputs: dict[str, Tensor], section: LossSection, chunk_tokens: int) -> tuple[Tensor, ...]:
    sums = chunked_distillation_loss(**inputs, loss=section, chunk_tokens=chunk_tokens)
    return torch.autograd.grad(sums.loss / TOKENS, [inputs["student_hidden"], inputs["student_head"]])
