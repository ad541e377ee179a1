"""The loop that every loss of logits runs in: it never holds more logits than those of one chunk."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Rows, the student's logits [n, vocab] of them, those of each constant head -> summed loss, divergence,
# cross-entropy, and the gradient of the first in the student's logits. It may overwrite all logits, and
# return the student's as the gradient.
BlockLoss = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]

# Rows of a chunk that a CPU takes from logits to gradient at once: what is between stays in its cache.
_CPU_BLOCK = 16
# Rows of a head that a CPU multiplies at once, for the same reason.
_CPU_TILE = 256


class DistillationSums(NamedTuple):
    """Sums over supervised tokens, float32 scalars; divide by the token count of the whole step.

    `loss` = kd_weight · T² · `kd` + ce_weight · `ce` carries the gradient. `kd` is the divergence at T
    without the factor T², `ce` the cross-entropy at T = 1 (0 where its weight is 0: it is not computed then).
    """

    loss: Tensor
    kd: Tensor
    ce: Tensor


def chunked_loss(
    hidden: Tensor,
    head: Tensor,
    block_loss: BlockLoss,
    *,
    chunk_tokens: int,
    constant: Sequence[tuple[Tensor, Tensor]] = (),
) -> DistillationSums:
    """Sum `block_loss` over the logits of `hidden` `[m, hidden]` by `head` `[vocab, hidden]`.

    Logits are projected in float32, `chunk_tokens` rows at a time, and so are those of the pairs in
    `constant`, which get no gradient. The gradients of `hidden` and `head` are computed beside the loss, so
    that the backward pass only scales them.
    """
    pairs = [(states.float(), weight.float()) for states, weight in constant]
    with torch.autocast(hidden.device.type, enabled=False):
        return DistillationSums(
            *_ChunkedLoss.apply(hidden.float(), head.float(), block_loss, chunk_tokens, pairs)
        )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        block_loss: BlockLoss,
        chunk_tokens: int,
        constant: Sequence[tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, vocab = len(hidden), len(head)
        sums = hidden.new_zeros(3)
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.empty_like(head) if num_rows else torch.zeros_like(head)
        pairs = [(hidden, head), *constant]
        # The same buffers for all chunks: fresh pages cost as much as what is computed in them.
        buffers = [hidden.new_empty(min(chunk_tokens, num_rows), vocab) for _ in pairs]
        for start in range(0, num_rows, chunk_tokens):
            rows = slice(start, min(start + chunk_tokens, num_rows))
            logits = [
                _project(states[rows], weight, buffer[: rows.stop - start])
                for (states, weight), buffer in zip(pairs, buffers, strict=True)
            ]
            for block in _blocks(logits[0]):
                of_block, *constants = (part[block] for part in logits)
                within = slice(start + block.start, start + block.stop)
                *terms, grad = block_loss(within, of_block, *constants)
                sums += torch.stack(terms)
                if grad is not of_block:
                    of_block.copy_(grad)
            logits_grad = logits[0]
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
        return hidden_grad.mul_(grad_output), head_grad.mul_(grad_output), None, None, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = _CPU_BLOCK if logits.is_cpu else len(logits)
    for start in range(0, len(logits), size):
        yield slice(start, min(start + size, len(logits)))


def _project(hidden: Tensor, head: Tensor, out: Tensor) -> Tensor:
    """`hidden @ head.t()` `[n, vocab]`, written to `out`."""
    if not hidden.is_cpu:
        return torch.mm(hidden, head.t(), out=out)
    # For MKL a few rows times a large matrix are slower than tiles the other way round, turned in the cache.
    tile = hidden.new_empty(min(_CPU_TILE, len(head)), len(hidden))
    for start in range(0, len(head), _CPU_TILE):
        columns = head[start : start + _CPU_TILE]
        torch.mm(columns, hidden.t(), out=tile[: len(columns)])
        out[:, start : start + _CPU_TILE] = tile[: len(columns)].t()
    return out
