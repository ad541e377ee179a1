"""The student with its loss: one module, so that whatever wraps it for training sees both."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tessera_cli.attention import AttentionLayer
from tessera_cli.distill.data.corpus import TrainBatch
from tessera_cli.distill.losses.hidden import HiddenStateLoss, layer_outputs
from tessera_cli.distill.students.layer_operators import training_operators
from tessera_cli.distill.teacher_cache.targets import Targets
from tessera_cli.kernels.packed import PackedAttention
from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.schema import LossSection


class StepSums(NamedTuple):
    """Sums over supervised tokens, float32 scalars, as `DistillationSums`; `hidden` is without its weight."""

    loss: Tensor
    kd: Tensor
    ce: Tensor
    hidden: Tensor


class PackedBatch:
    """A micro-batch on the device, its documents isolated from each other by attention in `layers`."""

    def __init__(self, batch: TrainBatch, layers: Sequence[AttentionLayer], device: torch.device) -> None:
        self.input_ids = batch.input_ids.to(device)
        self.positions = batch.positions.to(device)
        self.target_index = batch.target_index.to(device)
        self.target_ids = batch.target_ids.to(device)
        self.attention = PackedAttention(batch.cu_seqlens, layers, device=device)

    def supervised_hidden(self, decoder: Decoder) -> Tensor:
        """[supervised tokens, hidden]: chosen before the head, which is never run on other tokens."""
        hidden = decoder(self.input_ids, self.positions, self.attention.attend, training_operators())
        return hidden.index_select(0, self.target_index)


class StudentLoss(nn.Module):
    """The recipe's loss of `student`, whose arithmetic is in `dtype`; the loss itself is in float32.

    `hidden`, where the recipe has such a loss, may have parameters of its own, which are trained as well.
    `measured` is a context that what computes the loss runs in.
    """

    def __init__(
        self,
        student: Decoder,
        hidden: HiddenStateLoss | None,
        *,
        loss: LossSection,
        chunk_tokens: int,
        dtype: torch.dtype,
        measured: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self.student = student
        self.hidden = hidden
        self._loss, self._chunk_tokens, self._dtype = loss, chunk_tokens, dtype
        self._measured = measured

    def forward(self, packed: PackedBatch, targets: Targets, teacher_outputs: Sequence[Tensor]) -> StepSums:
        """`teacher_outputs` are [m, hidden], one for each pair of `hidden`."""
        layers = () if self.hidden is None else self.hidden.student_layers
        mixed = self._dtype != torch.float32
        with (
            layer_outputs(self.student, layers, packed.target_index) as outputs,
            torch.autocast(packed.target_ids.device.type, dtype=self._dtype, enabled=mixed),
        ):
            hidden = packed.supervised_hidden(self.student)
        with self._measured():
            sums = targets.loss(
                hidden,
                self.student.head_weight,
                packed.target_ids,
                loss=self._loss,
                chunk_tokens=self._chunk_tokens,
            )
            if self.hidden is None:
                return StepSums(*sums, torch.zeros_like(sums.loss))
            distance = self.hidden(outputs, teacher_outputs)
            return StepSums(sums.loss + self.hidden.weight * distance, sums.kd, sums.ce, distance)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """All that the optimiser moves, by name: the student's by its own names, others' under `hidden.`."""
        return {
            name.removeprefix("student."): value
            for name, value in self.named_parameters()
            if value.requires_grad
        }
