"""The loss against what is kept of a teacher's distribution: its likeliest tokens, or tokens drawn from it.

As in `losses`, p is the teacher's distribution at T and q the student's, logarithms are natural, everything
is computed from float32 log-probabilities, and the logits of one chunk exist at a time. The student's own
logits are always whole.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

from tessera_cli.distill.losses.chunked import DistillationSums, chunked_loss
from tessera_cli.distill.losses.dense import divergence
from tessera_cli.recipe.schema import LossSection

# Student logits [n, vocab], rows -> summed divergence at T, and T² times its gradient in the logits.
_KdOfBlock = Callable[[Tensor, slice], tuple[Tensor, Tensor]]


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

    def kd_of_block(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        return _bucket_divergence(logits, teacher_ids[rows], teacher_log_probs[rows], loss)

    return _chunked(
        student_hidden, student_head, target_ids, len(teacher_ids), kd_of_block, loss, chunk_tokens
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

    def kd_of_block(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        log_q = torch.log_softmax(logits / loss.temperature, -1)
        ids, weights = drawn_ids[rows], shares[rows]
        kd = -(weights * log_q.gather(1, ids)).sum() - entropy[rows].sum()
        grad = log_q.exp_().scatter_add_(1, ids, -weights)
        return kd, grad.mul_(loss.temperature)

    return _chunked(student_hidden, student_head, target_ids, len(drawn_ids), kd_of_block, loss, chunk_tokens)


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
    kd_of_block: _KdOfBlock,
    loss: LossSection,
    chunk_tokens: int,
) -> DistillationSums:
    if not len(hidden) == len(target_ids) == num_rows:
        raise ValueError("student, teacher and targets must cover the same positions")

    def block_loss(rows: slice, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kd, grad = kd_of_block(logits, rows)
        total, ce = loss.kd_weight * loss.temperature**2 * kd, kd.new_zeros(())
        if loss.kd_weight != 1:
            grad.mul_(loss.kd_weight)
        if loss.ce_weight:
            targets = target_ids[rows]
            plain = torch.log_softmax(logits, -1)
            ce = nll_loss(plain, targets, reduction="sum")
            total = total + loss.ce_weight * ce
            plain.exp_()[torch.arange(len(targets), device=logits.device), targets] -= 1
            grad.add_(plain, alpha=loss.ce_weight)
        return total, kd, ce, grad

    return chunked_loss(hidden, head, block_loss, chunk_tokens=chunk_tokens)
