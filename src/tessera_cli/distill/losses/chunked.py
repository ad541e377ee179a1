"""The loop that every loss of logits runs in: it never holds more logits than those of one chunk."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Student logits [n, vocab], the rows they are of -> summed loss, divergence, cross-entropy, and the gradient
# of the first in the logits. It may overwrite the logits and return them as the gradient.
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor, Tensor, Tensor]]


class DistillationSums(NamedTuple):
    """Sums over supervised tokens, float32 scalars; divide by the token count of the whole step.

    `loss` = kd_weight · T² · `kd` + ce_weight · `ce` carries the gradient. `kd` is the divergence at T
    without the factor T², `ce` the cross-entropy at T = 1 (0 where its weight is 0: it is not computed then).
    """

    loss: Tensor
    kd: Tensor
    ce: Tensor


def chunked_loss(
    hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, *, chunk_tokens: int
) -> DistillationSums:
    """Sum `chunk_loss` over the logits of `hidden` `[m, hidden]` by `head` `[vocab, hidden]`.

    Logits are projected in float32, `chunk_tokens` rows at a time. The gradients of `hidden` and `head` are
    computed beside the loss, so that the backward pass only scales them.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        return DistillationSums(*_ChunkedLoss.apply(hidden.float(), head.float(), chunk_loss, chunk_tokens))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, chunk_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows = len(hidden)
        sums = hidden.new_zeros(3)
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.empty_like(head) if num_rows else torch.zeros_like(head)
        # One buffer for all chunks: fresh pages cost as much as what is computed in them.
        buffer = hidden.new_empty(min(chunk_tokens, num_rows), len(head))
        for start in range(0, num_rows, chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, num_rows))
            logits = torch.mm(hidden[rows], head.t(), out=buffer[: rows.stop - start])
            *terms, logits_grad = chunk_loss(logits, rows)
            sums += torch.stack(terms)
            torch.mm(logits_grad, head, out=hidden_grad[rows])
            head_grad.addmm_(logits_grad.t(), hidden[rows], beta=0 if start == 0 else 1)
        ctx.save_for_backward(hidden_grad, head_grad)
        total, kd, ce = sums.unbind()
        ctx.mark_non_differentiable(kd, ce)
        return total, kd, ce

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, head_grad = ctx.saved_tensors
        # In place: the head's gradient is as large as the head, and nobody needs it unscaled.
        return hidden_grad.mul_(grad_output), head_grad.mul_(grad_output), None, None
