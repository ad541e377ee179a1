"""Divergences between teacher and student, and the loss that never holds all logits at once.

p is the teacher's distribution, q the student's, both softmax(logits / T); logarithms are natural. Everything
is computed from float32 log-probabilities and nothing is clamped: a negative value would be a defect to see.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from tessera_cli.distill.losses.chunked import DistillationSums, chunked_loss
from tessera_cli.recipe.schema import LossSection

Divergence = Callable[[Tensor, Tensor], Tensor]


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(p ‖ q) = Σ p (log p − log q): log-probabilities `[n, vocab]`, twice -> nats `[n]`."""
    return _kl(teacher, student)


def reverse_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """KL(q ‖ p), as in MiniLLM (arXiv 2306.08543). Shapes of `forward_kl`."""
    return _kl(student, teacher)


def jsd(teacher: Tensor, student: Tensor, *, mixture_weight: float) -> Tensor:
    """w KL(p ‖ m) + (1 − w) KL(q ‖ m), m = w p + (1 − w) q: the generalised JSD of GKD (arXiv 2306.13649).

    Shapes of `forward_kl`.

    Raises:
        ValueError: `mixture_weight` is not between 0 and 1, at which the formula vanishes.
    """
    mixture = _log_mixture(teacher, student, mixture_weight)
    return mixture_weight * _kl(teacher, mixture) + (1 - mixture_weight) * _kl(student, mixture)


def skew_kl(teacher: Tensor, student: Tensor, *, mixture_weight: float) -> Tensor:
    """KL(p ‖ w p + (1 − w) q), as in DistiLLM (arXiv 2402.03898). Shapes and errors of `jsd`."""
    return _kl(teacher, _log_mixture(teacher, student, mixture_weight))


def skew_reverse_kl(teacher: Tensor, student: Tensor, *, mixture_weight: float) -> Tensor:
    """KL(q ‖ w p + (1 − w) q); DistiLLM's λ is the student's share, 1 − w. Shapes and errors of `jsd`."""
    return _kl(student, _log_mixture(teacher, student, mixture_weight))


def tvd(teacher: Tensor, student: Tensor) -> Tensor:
    """Total variation ½ Σ |p − q| = 1 − Σ min(p, q). Shapes of `forward_kl`."""
    return 0.5 * (teacher.exp() - student.exp()).abs().sum(-1)


def divergence(loss: LossSection) -> Divergence:
    """The divergence that a recipe asks for, as a function of teacher and student log-probabilities."""
    if loss.mixture_weight is None:
        return {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "tvd": tvd}[loss.kind]
    mixed = {"jsd": jsd, "skew_kl": skew_kl, "skew_reverse_kl": skew_reverse_kl}
    return partial(mixed[loss.kind], mixture_weight=loss.mixture_weight)


def _kl(a: Tensor, b: Tensor) -> Tensor:
    # 0 log 0 = 0, also where both are -inf: the difference is replaced before it can make a NaN gradient.
    probabilities = a.exp()
    return (probabilities * (a - b).masked_fill(probabilities == 0, 0.0)).sum(-1)


def _log_mixture(teacher: Tensor, student: Tensor, weight: float) -> Tensor:
    if not 0 < weight < 1:
        raise ValueError(f"mixture_weight must be between 0 and 1, got {weight}")
    absent = torch.isneginf(teacher) & torch.isneginf(student)
    teacher, student = teacher.masked_fill(absent, 0.0), student.masked_fill(absent, 0.0)
    mixture = torch.logaddexp(teacher + math.log(weight), student + math.log1p(-weight))
    return mixture.masked_fill(absent, -math.inf)


def chunked_distillation_loss(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    target_ids: Tensor,
    *,
    loss: LossSection,
    chunk_tokens: int,
    student_soft_cap: float | None = None,
    teacher_soft_cap: float | None = None,
) -> DistillationSums:
    """The recipe's loss over supervised tokens, `chunk_tokens` of them at a time.

    Logits are projected in float32 and exist for one chunk only. The gradients of `student_hidden` and
    `student_head` are computed beside the loss, so that the backward pass only scales them.

    Args:
        student_hidden: [m, hidden], of the supervised positions; a model that scales its logits has scaled
            these.
        student_head: [vocab, hidden].
        teacher_hidden: [m, teacher_hidden], of the same positions; constant.
        teacher_head: [vocab, teacher_hidden]; constant.
        target_ids: int64 [m], the token that follows each position.
        loss: kind, temperature and weights.
        chunk_tokens: supervised tokens in a chunk.
        student_soft_cap: c of the model's logits = c tanh(products / c); None: the products themselves.
        teacher_soft_cap: the same of the teacher.

    Raises:
        ValueError: the shapes disagree.
    """
    if not student_hidden.shape[0] == teacher_hidden.shape[0] == target_ids.shape[0]:
        raise ValueError("student, teacher and targets must cover the same positions")
    if student_head.shape[0] != teacher_head.shape[0]:
        raise ValueError(f"vocabularies differ: {student_head.shape[0]} and {teacher_head.shape[0]}")
    of_logits = _closed_form_forward_kl if loss.kind == "forward_kl" else _by_autograd

    def block_loss(
        rows: slice, logits: Tensor, teacher_logits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slope = None if student_soft_cap is None else _soft_cap(logits, student_soft_cap)
        if teacher_soft_cap is not None:
            _soft_cap(teacher_logits, teacher_soft_cap)
        total, kd, ce, logits_grad = of_logits(logits, teacher_logits, target_ids[rows], loss=loss)
        return total, kd, ce, logits_grad if slope is None else logits_grad.mul_(slope)

    return chunked_loss(
        student_hidden,
        student_head,
        block_loss,
        chunk_tokens=chunk_tokens,
        constant=[(teacher_hidden, teacher_head)],
    )


def _soft_cap(products: Tensor, cap: float) -> Tensor:
    """Turn `products` into c tanh(products / c) in place; the derivative."""
    tanh = products.div_(cap).tanh_()
    slope = 1 - tanh.square()
    products.mul_(cap)
    return slope


def _by_autograd(
    logits: Tensor, teacher_logits: Tensor, target_ids: Tensor, *, loss: LossSection
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summed loss, divergence, cross-entropy and the gradient of the first in `logits` [n, vocab]."""
    temperature = loss.temperature
    with torch.enable_grad():
        logits = logits.detach().requires_grad_()
        teacher = torch.log_softmax(teacher_logits / temperature, -1)
        kd = divergence(loss)(teacher, torch.log_softmax(logits / temperature, -1)).sum()
        ce = _cross_entropy(torch.log_softmax(logits, -1), target_ids) if loss.ce_weight else kd.new_zeros(())
        total = loss.kd_weight * temperature**2 * kd + loss.ce_weight * ce
        (grad,) = torch.autograd.grad(total, logits)
    return total.detach(), kd.detach(), ce.detach(), grad


def _closed_form_forward_kl(
    logits: Tensor, teacher_logits: Tensor, target_ids: Tensor, *, loss: LossSection
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `_by_autograd` gives, from ∂ T² KL(p ‖ q) / ∂ logits = T (q − p), in few passes.

    Both logits are finite here, so no term of the sum can be 0 · inf. Works in the logits of both.
    """
    temperature = loss.temperature
    ce = logits.new_zeros(())
    if loss.ce_weight:
        plain = torch.log_softmax(logits, -1)
        ce = _cross_entropy(plain, target_ids)
        ce_grad = plain.exp_()
        ce_grad[torch.arange(len(target_ids), device=logits.device), target_ids] -= 1
    if temperature != 1:
        teacher_logits.div_(temperature)
        logits.div_(temperature)
    teacher, student = torch.log_softmax(teacher_logits, -1), torch.log_softmax(logits, -1)
    p = torch.exp(teacher, out=teacher_logits)
    kd = torch.mul(p, teacher.sub_(student), out=logits).sum()
    total = loss.kd_weight * temperature**2 * kd + loss.ce_weight * ce
    grad = torch.sub(student.exp_(), p, out=logits)
    if loss.kd_weight * temperature != 1:
        grad.mul_(loss.kd_weight * temperature)
    if loss.ce_weight:
        grad.add_(ce_grad, alpha=loss.ce_weight)
    return total, kd, ce, grad


def _cross_entropy(log_probabilities: Tensor, target_ids: Tensor) -> Tensor:
    return nll_loss(log_probabilities, target_ids, reduction="sum")
