"""The student with its loss: one module, so that whatever wraps it for training sees both."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tessera_cli.distill.data.corpus import TrainBatch
from tessera_cli.distill.losses.hidden import HiddenStateLoss, layer_outputs
from tessera_cli.distill.teacher_cache.targets import Targets
from tessera_cli.kernels.packed import PackedAttention
from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.schema import LossSection
from tessera_cli.recipe.train_section import TrainSection


class StepSums(NamedTuple):
    """Sums over supervised tokens, float32 scalars, as `DistillationSums`; `hidden` is without its weight."""

    loss: Tensor
    kd: Tensor
    ce: Tensor
    hidden: Tensor


class PackedBatch:
    """A micro-batch on the device, its documents isolated from each other by attention."""

    def __init__(self, batch: TrainBatch, device: torch.device) -> None:
        self.input_ids = batch.input_ids.to(device)
        self.positions = batch.positions.to(device)
        self.target_index = batch.target_index.to(device)
        self.target_ids = batch.target_ids.to(device)
        self._cu_seqlens, self._device = batch.cu_seqlens, device

    def supervised_hidden(self, decoder: Decoder) -> Tensor:
        """[supervised tokens, hidden]: chosen before the head, which is never run on other tokens."""
        attention = PackedAttention(self._cu_seqlens, decoder.attention_layers, device=self._device)
        hidden = decoder(self.input_ids, self.positions, attention.attend)
        return hidden.index_select(0, self.target_index)


class StudentLoss(nn.Module):
    """The recipe's loss of `student`, whose arithmetic is in `dtype`; the loss itself is in float32.

    `hidden`, where the recipe has such a loss, may have parameters of its own, which are trained as well.
    """

    def __init__(
        self,
        student: Decoder,
        hidden: HiddenStateLoss | None,
        *,
        loss: LossSection,
        train: TrainSection,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.student = student
        self.hidden = hidden
        self._loss, self._chunk_tokens, self._dtype = loss, train.loss_chunk_tokens, dtype

    def forward(self, packed: PackedBatch, targets: Targets, teacher_outputs: Sequence[Tensor]) -> StepSums:
        """`teacher_outputs` are [m, hidden], one for each pair of `hidden`."""
        layers = () if self.hidden is None else self.hidden.student_layers
        mixed = self._dtype != torch.float32
        with (
            layer_outputs(self.student, layers, packed.target_index) as outputs,
            torch.autocast(packed.target_ids.device.type, dtype=self._dtype, enabled=mixed),
        ):
            hidden = packed.supervised_hidden(self.student)
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
        return {name.removeprefix("student."): value for name, value in self.named_parameters()}
