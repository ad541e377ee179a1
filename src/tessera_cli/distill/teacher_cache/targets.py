"""The teacher's side of the loss of a batch, in whichever form it is kept."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tessera_cli.distill.losses.chunked import DistillationSums
from tessera_cli.distill.losses.dense import chunked_distillation_loss
from tessera_cli.distill.losses.sparse import sampled_distillation_loss, topk_distillation_loss
from tessera_cli.recipe.schema import LossSection


class Targets(Protocol):
    """What the teacher says at the supervised positions of a batch."""

    def loss(
        self, hidden: Tensor, head: Tensor, target_ids: Tensor, *, loss: LossSection, chunk_tokens: int
    ) -> DistillationSums:
        """The recipe's loss of a student's `hidden` [m, hidden] and `head` [vocab, hidden] against them."""
        ...


@dataclass(frozen=True, eq=False)
class HiddenTargets:
    """Final hidden states [m, teacher_hidden] and the teacher's head [vocab, teacher_hidden]: everything."""

    hidden: Tensor
    head: Tensor

    def loss(
        self, hidden: Tensor, head: Tensor, target_ids: Tensor, *, loss: LossSection, chunk_tokens: int
    ) -> DistillationSums:
        return chunked_distillation_loss(
            hidden, head, self.hidden, self.head, target_ids, loss=loss, chunk_tokens=chunk_tokens
        )


@dataclass(frozen=True, eq=False)
class TopKTargets:
    """The likeliest ids (int64 [m, k]) and log-probabilities (float32 [m, k + 1]), the rest's the last."""

    ids: Tensor
    log_probs: Tensor

    def loss(
        self, hidden: Tensor, head: Tensor, target_ids: Tensor, *, loss: LossSection, chunk_tokens: int
    ) -> DistillationSums:
        return topk_distillation_loss(
            hidden, head, self.ids, self.log_probs, target_ids, loss=loss, chunk_tokens=chunk_tokens
        )


@dataclass(frozen=True, eq=False)
class SampleTargets:
    """Drawn ids (int64 [m, n]), each one's share of the draws (float32, 0 for padding), entropies [m]."""

    ids: Tensor
    shares: Tensor
    entropy: Tensor

    def loss(
        self, hidden: Tensor, head: Tensor, target_ids: Tensor, *, loss: LossSection, chunk_tokens: int
    ) -> DistillationSums:
        return sampled_distillation_loss(
            hidden,
            head,
            self.ids,
            self.shares,
            self.entropy,
            target_ids,
            loss=loss,
            chunk_tokens=chunk_tokens,
        )
