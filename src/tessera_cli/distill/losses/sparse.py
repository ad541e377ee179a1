"""The loss against what is kept of a teacher's distribution: its likeliest tokens, or tokens drawn from it.

As in `losses`, p is the teacher's distribution at T and q the student's, logarithms are natural, everything
is computed from float32 log-probabilities, and the logits of one chunk exist at a time. The student's own
logits are always whole.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, nll_loss

from tessera_cli.distill.losses.dense import DistillationSums, divergence
from tessera_cli.recipe.schema import LossSection

# Student logits [n, vocab], rows -> summed divergence at T, and T² times its gradient in the logits.
_KdOfChunk = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


def topk_distillation_loss(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    target_ids: Tensor,
    *,
    loss: LossSection,
    chunk_tokens: int,
) -> DistillationSums:
    """The recipe's divergence between p and q over k + 1 outcomes: the kept tokens, and any other one.

    Merging outcomes can only lower a divergence (data processing), so the sum is at most that of the whole
    distributions, and unlike a plain truncation it is never negative; the student's mass on other tokens is
    paid for.

    Args:
        student_hidden: [m, hidden], of the supervised positions.
        student_head: [vocab, hidden].
        teacher_ids: int64 [m, k], distinct in a row, k < vocab.
        teacher_log_probs: float32 [m, k + 1], of the kept tokens and last of all others together, at T.
        target_ids: int64 [m].
        loss: kind, temperature and weights.
        chunk_tokens: supervised tokens in a chunk.

    Raises:
        ValueError: the shapes disagree, or k is the whole vocabulary.
    """
    k = teacher_ids.shape[1]
    if teacher_log_probs.shape != (len(teacher_ids), k + 1) or k >= student_head.shape[0]:
        raise ValueError("expected log-probabilities of k < vocab tokens and of the rest")

    def kd_of_chunk(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return _bucket_divergence(logits, teacher_ids[rows], teacher_log_probs[rows], loss)

    return _chunked(
        student_hidden, student_head, target_ids, len(teacher_ids), kd_of_chunk, loss, chunk_tokens
    )


def sampled_distillation_loss(
    student_hidden: Tensor,
    student_head: Tensor,
    drawn_ids: Tensor,
    shares: Tensor,
    entropy: Tensor,
    target_ids: Tensor,
    *,
    loss: LossSection,
    chunk_tokens: int,
) -> DistillationSums:
    """Forward KL with p replaced by the frequencies w of tokens drawn from it: random-sampling KD.

    The gradient T (q − w) is unbiased, for E[w] = p (arXiv 2503.16870; the tokens are drawn from p itself, so
    that every importance weight is 1). The sum is −Σ w log q − H(p), an unbiased estimate of KL(p ‖ q).

    Args:
        student_hidden: [m, hidden], of the supervised positions.
        student_head: [vocab, hidden].
        drawn_ids: int64 [m, n]; padding may repeat an id.
        shares: float32 [m, n], sums to 1 in a row; 0 at padding.
        entropy: float32 [m], H(p) in nats.
        target_ids: int64 [m].
        loss: temperature and weights; its kind is forward_kl.
        chunk_tokens: supervised tokens in a chunk.

    Raises:
        ValueError: the shapes disagree, or the kind is another one.
    """
    if loss.kind != "forward_kl":
        raise ValueError(f"drawn tokens estimate forward_kl only, not {loss.kind}")
    if drawn_ids.shape != shares.shape or len(entropy) != len(drawn_ids):
        raise ValueError("expected a share for each drawn token and an entropy for each position")

    def kd_of_chunk(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_q = torch.log_softmax(logits / loss.temperature, -1)
        ids, weights = drawn_ids[rows], shares[rows]
        kd = -(weights * log_q.gather(1, ids)).sum() - entropy[rows].sum()
        grad = log_q.exp_().scatter_add_(1, ids, -weights)
        return kd, grad.mul_(loss.temperature)

    return _chunked(student_hidden, student_head, target_ids, len(drawn_ids), kd_of_chunk, loss, chunk_tokens)


def _bucket_divergence(
    logits: Tensor, ids: Tensor, log_p: Tensor, loss: LossSection
) -> tuple[Tensor, Tensor]:
    scaled = logits / loss.temperature
    kept = scaled.gather(1, ids)
    # The rest's mass is summed over the rest: 1 − Σ kept would lose all digits of a small one.
    rest = scaled.scatter_(1, ids, -torch.inf)
    tail = torch.logsumexp(rest, -1, keepdim=True)
    with torch.enable_grad():
        outcomes = torch.cat([kept, tail], -1).requires_grad_()
        kd = divergence(loss)(log_p, torch.log_softmax(outcomes, -1)).sum()
        (slope,) = torch.autograd.grad(kd, outcomes)
    slope = slope * loss.temperature
    # ∂ tail / ∂ logits is the softmax over the rest, which is 0 at the kept tokens.
    grad = rest.sub_(tail).exp_().mul_(slope[:, -1:])
    return kd.detach(), grad.scatter_(1, ids, slope[:, :-1])


def _chunked(
    hidden: Tensor,
    head: Tensor,
    target_ids: Tensor,
    num_rows: int,
    kd_of_chunk: _KdOfChunk,
    loss: LossSection,
    chunk_tokens: int,
) -> DistillationSums:
    if not len(hidden) == len(target_ids) == num_rows:
        raise ValueError("student, teacher and targets must cover the same positions")
    chunk_loss = partial(_weighted, kd_of_chunk=kd_of_chunk, loss=loss)
    with torch.autocast(hidden.device.type, enabled=False):
        sums = _SparseLoss.apply(hidden.float(), head.float(), target_ids, chunk_loss, chunk_tokens)
    return DistillationSums(*sums)


def _weighted(
    logits: Tensor, rows: slice, target_ids: Tensor, *, kd_of_chunk: _KdOfChunk, loss: LossSection
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summed loss, divergence, cross-entropy and the gradient of the first in `logits` [n, vocab]."""
    kd, grad = kd_of_chunk(logits, rows)
    total, ce = loss.kd_weight * loss.temperature**2 * kd, kd.new_zeros(())
    grad.mul_(loss.kd_weight)
    if loss.ce_weight:
        plain = torch.log_softmax(logits, -1)
        ce = nll_loss(plain, target_ids, reduction="sum")
        total = total + loss.ce_weight * ce
        plain.exp_()[torch.arange(len(target_ids), device=logits.device), target_ids] -= 1
        grad.add_(plain, alpha=loss.ce_weight)
    return total, kd, ce, grad


class _SparseLoss(torch.autograd.Function):
    """The gradients of hidden states and head beside the loss, so that the backward pass only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        target_ids: Tensor,
        chunk_loss: Callable[[Tensor, slice, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]],
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums = torch.zeros(3, device=hidden.device)
        hidden_grad, head_grad = torch.zeros_like(hidden), torch.zeros_like(head)
        for start in range(0, hidden.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            *terms, logits_grad = chunk_loss(linear(hidden[rows], head), rows, target_ids[rows])
            sums += torch.stack(terms)
            torch.mm(logits_grad, head, out=hidden_grad[rows])
            head_grad.addmm_(logits_grad.t(), hidden[rows])
        ctx.save_for_backward(hidden_grad, head_grad)
        total, kd, ce = sums.unbind()
        ctx.mark_non_differentiable(kd, ce)
        return total, kd, ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad.mul_(grad_output), head_grad.mul_(grad_output), None, None, None
