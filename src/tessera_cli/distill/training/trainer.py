"""The optimiser steps of a run: teacher forward, student forward and loss, backward, AdamW."""

import math
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor

from tessera_cli.distill.events import Listener, Note, TrainStep
from tessera_cli.distill.losses.hidden import hidden_loss, layer_outputs
from tessera_cli.distill.losses.student_loss import PackedBatch, StepSums, StudentLoss
from tessera_cli.distill.training.checkpoint import TrainerState
from tessera_cli.distill.training.optimizer import adamw, learning_rate
from tessera_cli.distill.training.teacher_side import CachedTeacher, OnlineTeacher, TeacherSide
from tessera_cli.errors import ModelError, RunError, UsageError
from tessera_cli.recipe.schema import LossSection
from tessera_cli.recipe.train_section import TrainSection

if TYPE_CHECKING:
    from tessera_cli.distill.data.corpus import TrainBatch
    from tessera_cli.models.decoder import Decoder


class Trainer:
    """Trains `student` towards `teacher`, one optimiser step at a time.

    The loss of a step is the sum over the supervised tokens of all its micro-batches, divided by their
    number: how the rows are split into micro-batches changes nothing.

    Args:
        student: float32 master weights, trained in place.
        teacher: in its own dtype, put in eval mode and frozen; or a cache of what it says.
        loss: the recipe's loss.
        train: the recipe's optimisation.
        num_steps: optimiser steps of the whole run, the length of the learning rate's schedule.
        device: "cpu" or "cuda"; both models are moved there.
        listener: told of every step.

    Raises:
        ModelError: the two vocabularies differ.
        UsageError: more than one process, or a device that is not there.
    """

    def __init__(
        self,
        student: "Decoder",
        teacher: "Decoder | CachedTeacher",
        *,
        loss: LossSection,
        train: TrainSection,
        num_steps: int,
        device: str,
        listener: Listener,
    ) -> None:
        side: TeacherSide = teacher if isinstance(teacher, CachedTeacher) else OnlineTeacher(teacher)
        student_vocab, teacher_vocab = student.head_weight.shape[0], side.vocab_size
        if student_vocab != teacher_vocab:
            raise ModelError(
                f"the student has {student_vocab} vocabulary rows and the teacher {teacher_vocab}",
                hint="start the student from this teacher's layers",
            )
        if any(parameter.dtype != torch.float32 for parameter in student.parameters()):
            raise ValueError("the student's master weights must be float32")
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        self.step = 0
        self.tokens = 0
        self.supervised_tokens = 0
        self._loss, self._train, self._num_steps, self._listener = loss, train, num_steps, listener

        self._accelerator = _single_process_accelerator(device)
        self._device = self._accelerator.device
        self._teacher = side
        self._teacher.to(self._device)
        student.to(self._device).train()
        self._decoder = None if isinstance(teacher, CachedTeacher) else teacher
        self._hidden = hidden_loss(loss.hidden, student, self._decoder)
        module = StudentLoss(
            student, self._hidden, loss=loss, train=train, dtype=_compute_dtype(train.dtype, self._device)
        ).to(self._device)
        self._parameters = module.trained_parameters()
        self._adamw = adamw(module, train)
        self._module, self._optimizer = self._accelerator.prepare(module, self._adamw)

    def train_step(self, micro_batches: "Sequence[TrainBatch]") -> TrainStep | None:
        """One optimiser step over `micro_batches`; tells the listener what it returns.

        Returns:
            The step's figures, or None for a step without a supervised token: it counts as a step, changes no
            weight, and the listener gets a note.

        Raises:
            RunError: loss or gradient are not finite (the weights are as before the step), or out of memory.
        """
        if self.step == self._num_steps:
            raise ValueError(f"the run has {self._num_steps} steps and all are done")
        batches = [batch for batch in micro_batches if len(batch.target_ids)]
        if not batches:
            self.step += 1
            self._listener(Note(f"step {self.step} has no supervised token and was skipped"))
            return None
        try:
            figures = self._optimise(batches)
        except torch.OutOfMemoryError as error:
            raise RunError(
                f"out of memory at step {self.step + 1}",
                hint="lower train.micro_batch_size and raise train.gradient_accumulation_steps as much",
            ) from error
        self._listener(figures)
        return figures

    def state_dict(self) -> TrainerState:
        """What `load_state_dict` needs to go on as if nothing had happened; its tensors are the live ones."""
        weights: dict[str, Tensor] = {**self._parameters}
        optimizer = {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self._adamw.state[parameter].items()
        }
        return TrainerState(self.step, self.tokens, self.supervised_tokens, weights, optimizer)

    @torch.no_grad()
    def load_state_dict(self, state: TrainerState) -> None:
        """Go on from `state`.

        Raises:
            UsageError: it belongs to another student or to a longer run.
        """
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        if shapes != {name: tensor.shape for name, tensor in state.student.items()}:
            raise UsageError("the checkpoint is of a student of another shape", hint="start a new run")
        if state.step > self._num_steps:
            raise UsageError(
                f"the checkpoint is at step {state.step} of a run of {self._num_steps}", hint="train longer"
            )
        for name, parameter in self._parameters.items():
            parameter.copy_(state.student[name])
        self._adamw.state.clear()
        for full_name, tensor in state.optimizer.items():
            name, key = full_name.rsplit("/", 1)
            self._adamw.state[self._parameters[name]][key] = tensor.to(self._device, copy=True)
        self.step, self.tokens, self.supervised_tokens = state.step, state.tokens, state.supervised_tokens

    def _optimise(self, batches: "Sequence[TrainBatch]") -> TrainStep:
        start = self._now()
        tokens = sum(len(batch.input_ids) for batch in batches)
        supervised = sum(len(batch.target_ids) for batch in batches)
        totals = torch.zeros(len(StepSums._fields), device=self._device)
        teacher_seconds = 0.0
        self._optimizer.zero_grad()
        for batch in batches:
            packed = PackedBatch(batch, self._device)
            teacher_start = self._now()
            with self._teacher_outputs(packed) as teacher_outputs:
                targets = self._teacher.targets(batch)
            teacher_seconds += self._now() - teacher_start
            sums: StepSums = self._module(packed, targets, teacher_outputs)
            self._accelerator.backward(sums.loss / supervised)
            totals += torch.stack([value.detach() for value in sums])
        grad_norm = self._accelerator.clip_grad_norm_(self._module.parameters(), self._train.max_grad_norm)
        loss, kd, ce, hidden, norm = torch.cat([totals / supervised, grad_norm.reshape(1)]).tolist()
        rate = self._apply(loss, norm)

        self.tokens += tokens
        self.supervised_tokens += supervised
        seconds = self._now() - start
        return TrainStep(
            step=self.step,
            num_steps=self._num_steps,
            tokens=self.tokens,
            supervised_tokens=self.supervised_tokens,
            loss=loss,
            kd_loss=kd,
            ce_loss=ce if self._loss.ce_weight else None,
            learning_rate=rate,
            grad_norm=norm,
            tokens_per_second=tokens / seconds,
            teacher_seconds=teacher_seconds,
            step_seconds=seconds,
            peak_memory_bytes=_peak_memory_bytes(self._device),
            hidden_loss=None if self._hidden is None else hidden,
        )

    def _teacher_outputs(self, packed: PackedBatch) -> AbstractContextManager[list[Tensor]]:
        """The teacher's outputs that the loss of hidden states asks for, once the teacher has run in it."""
        if self._hidden is None or self._decoder is None:
            return nullcontext([])
        return layer_outputs(self._decoder, self._hidden.teacher_layers, packed.target_index)

    def _apply(self, loss: float, grad_norm: float) -> float:
        """Move the weights by the gradients at hand; the learning rate used."""
        step = self.step + 1
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunError(
                f"diverged at step {step}: loss {loss}, gradient norm {grad_norm}",
                hint="lower train.learning_rate and start a new run",
            )
        rate = learning_rate(step, self._num_steps, self._train)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.step = step
        return rate

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _single_process_accelerator(device: str) -> Accelerator:
    # The plugin, unlike the plain argument, can not be overridden by accelerate's environment variables.
    accelerator = Accelerator(
        cpu=device == "cpu",
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )
    if accelerator.num_processes > 1:
        raise UsageError(
            f"training runs in one process for now, this is one of {accelerator.num_processes}",
            hint="start `tessera distill` itself, not through a launcher",
        )
    if accelerator.device.type != torch.device(device).type:
        raise UsageError(
            f"device {device} is not available, only {accelerator.device}", hint="use another device"
        )
    return accelerator


def _compute_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _peak_memory_bytes(device: torch.device) -> int:
    """The most that the device's allocator has held, or on the CPU the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
