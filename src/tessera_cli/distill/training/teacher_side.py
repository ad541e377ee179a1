"""Where a trainer gets the teacher's side of the loss: from the teacher itself, or from a cache."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from tessera_cli.distill.data.corpus import TrainBatch
from tessera_cli.distill.students.student import forward_batch
from tessera_cli.distill.teacher_cache.reader import CacheReader
from tessera_cli.distill.teacher_cache.targets import HiddenTargets, Targets
from tessera_cli.distill.training.throughput import forward_flops
from tessera_cli.models.decoder import Decoder


class TeacherSide(Protocol):
    """A frozen teacher, as far as a trainer needs it."""

    vocab_size: int

    def to(self, device: torch.device) -> None:
        """Move there what is in memory."""
        ...

    def targets(self, batch: TrainBatch) -> Targets:
        """The teacher's side of the loss of `batch`."""
        ...

    def flops(self, batches: Sequence[TrainBatch]) -> int:
        """Floating-point operations that the teacher's side of the loss of `batches` needs."""
        ...


class OnlineTeacher:
    """Runs the teacher, in its own dtype, in eval mode and frozen."""

    def __init__(self, teacher: Decoder) -> None:
        self.vocab_size = teacher.head_weight.shape[0]
        self._teacher = teacher.eval().requires_grad_(False)
        self._head = teacher.head_weight.detach().float()

    def to(self, device: torch.device) -> None:
        """See `TeacherSide.to`."""
        self._teacher = self._teacher.to(device)
        self._head = self._head.to(device)

    @torch.inference_mode()
    def targets(self, batch: TrainBatch) -> HiddenTargets:
        """See `TeacherSide.targets`: chosen before the head, which is never run on other tokens."""
        hidden = forward_batch(self._teacher, batch)
        return HiddenTargets(hidden.index_select(0, batch.target_index.to(hidden.device)), self._head)

    def flops(self, batches: Sequence[TrainBatch]) -> int:
        """See `TeacherSide.flops`."""
        return forward_flops(self._teacher.config, batches)


class CachedTeacher:
    """Reads a cache; of the teacher itself only its head (`[vocab, hidden]`) is in memory."""

    def __init__(self, reader: CacheReader, head: Tensor) -> None:
        self.vocab_size = head.shape[0]
        self._reader, self._head = reader, head.detach().float()

    def to(self, device: torch.device) -> None:
        """See `TeacherSide.to`."""
        self._head = self._head.to(device)

    def targets(self, batch: TrainBatch) -> Targets:
        """See `TeacherSide.targets`."""
        return self._reader.targets(batch, self._head)

    def flops(self, batches: Sequence[TrainBatch]) -> int:
        """See `TeacherSide.flops`: the head's, where hidden states are kept."""
        if not self._reader.keeps_hidden:
            return 0
        return 2 * self._head.numel() * sum(len(batch.target_ids) for batch in batches)
