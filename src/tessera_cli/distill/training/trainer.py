"""The optimiser steps of a run: teacher forward, student forward and loss, backward, AdamW."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tessera_cli.distill.events import Listener, Note, TrainStep
from tessera_cli.distill.losses.hidden import hidden_loss, layer_outputs
from tessera_cli.distill.losses.student_loss import PackedBatch, StepSums, StudentLoss
from tessera_cli.distill.training.checkpoint import TrainerState
from tessera_cli.distill.training.freed_memory import keep_freed_memory
from tessera_cli.distill.training.layer_forward import prepare_layers
from tessera_cli.distill.training.optimizer import StudentOptimizer
from tessera_cli.distill.training.processes import Processes, Share
from tessera_cli.distill.training.teacher_side import CachedTeacher, OnlineTeacher, TeacherSide
from tessera_cli.distill.training.throughput import StepMeter
from tessera_cli.errors import DivergedError, ModelError, RunError, UsageError
from tessera_cli.recipe.schema import LossSection
from tessera_cli.recipe.train_section import TrainSection

if TYPE_CHECKING:
    from tessera_cli.distill.data.corpus import TrainBatch
    from tessera_cli.models.decoder import Decoder


class Trainer:
    """Trains `student` towards `teacher`, one optimiser step at a time.

    The loss of a step is the sum over the supervised tokens of all its micro-batches, divided by their
    number: how the rows are split into micro-batches, and these over processes, changes nothing.

    Args:
        student: float32 master weights, trained in place; those that need no gradient stay.
        teacher: in its own dtype, put in eval mode and frozen; or a cache of what it says.
        loss: the recipe's loss.
        train: the recipe's optimisation.
        num_steps: optimiser steps of the whole run, the length of the learning rate's schedule.
        processes: who trains; both models are moved to their device.
        listener: told of every step.
        seed: decides, with a step's and a micro-batch's number, what dropout leaves out.

    Attributes:
        step: steps taken.
        tokens: those that passed through the student, `supervised_tokens` those that were targets.
        parameters: what is trained, by name: the student's own, and under `hidden.` what its loss adds.

    Raises:
        ModelError: the two vocabularies differ.
    """

    def __init__(
        self,
        student: "Decoder",
        teacher: "Decoder | CachedTeacher",
        *,
        loss: LossSection,
        train: TrainSection,
        num_steps: int,
        processes: Processes,
        listener: Listener,
        seed: int = 0,
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
        self._processes, self._device, self._seed = processes, processes.device, seed
        if self._device.type == "cpu":
            keep_freed_memory()
        self._teacher = side
        self._teacher.to(self._device)
        self._student = student.to(self._device).eval()  # but for its steps
        prepare_layers(student, train)
        self._decoder = None if isinstance(teacher, CachedTeacher) else teacher
        self._hidden = hidden_loss(loss.hidden, student, self._decoder)
        dtype = compute_dtype(train.dtype, self._device)
        self._meter = StepMeter(
            student.config, dtype=dtype, device=self._device, num_processes=processes.count
        )
        module = StudentLoss(
            student,
            self._hidden,
            loss=loss,
            chunk_tokens=train.loss_chunk_tokens,
            dtype=dtype,
            measured=partial(self._meter.phase, "loss"),
        ).to(self._device)
        self._module = processes.wrap(module, train)
        self.parameters = module.trained_parameters()
        self._optimizer = StudentOptimizer(
            self.parameters, train, num_steps=num_steps, dtype=dtype, device=self._device
        )

    def train_step(self, micro_batches: "Sequence[TrainBatch]") -> TrainStep | None:
        """One optimiser step over `micro_batches`; tells the listener what it returns.

        Returns:
            The step's figures, or None for a step that counts and changes no weight: one without a supervised
            token, or one whose gradients overflow float16. The listener gets a note.

        Raises:
            DivergedError: loss or gradient are not finite; the weights are as before the step.
            RunError: out of memory.
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
        self._listener(figures or Note(f"step {self.step} overflowed float16 and was left out"))
        return figures

    def state_dict(self) -> TrainerState:
        """What `load_state_dict` needs to go on as if nothing had happened; see `StudentOptimizer.state`."""
        return self._optimizer.state(
            step=self.step, tokens=self.tokens, supervised_tokens=self.supervised_tokens
        )

    def load_state_dict(self, state: TrainerState) -> None:
        """Go on from `state`.

        Raises:
            UsageError: it belongs to another student or to a longer run.
        """
        if state.step > self._num_steps:
            raise UsageError(
                f"the checkpoint is at step {state.step} of a run of {self._num_steps}", hint="train longer"
            )
        self._optimizer.load(state)
        self.step, self.tokens, self.supervised_tokens = state.step, state.tokens, state.supervised_tokens

    @contextmanager
    def measured_weights(self) -> Iterator[None]:
        """In here the student's weights are those to measure and export: the average, where there is one."""
        average = self._optimizer.average
        with nullcontext() if average is None else average.in_place():
            yield
            self._processes.reshard(self._student)

    def _optimise(self, batches: "Sequence[TrainBatch]") -> TrainStep | None:
        self._meter.start()
        self._student.train()
        supervised = sum(len(batch.target_ids) for batch in batches)
        # What each micro-batch adds, and in the last column the slots that its attention took.
        totals = torch.zeros(len(batches), len(StepSums._fields) + 1, device=self._device)
        self._optimizer.zero_grad()
        share = self._processes.deal(batches)
        for part in share:
            weight = self._processes.count / supervised if part.counts else 0.0
            sums, num_slots = self._accumulate(part, weight, complete=part is share[-1])
            if part.counts:
                totals[part.number] = torch.stack([*sums, sums.loss.new_tensor(num_slots)])
        self._student.eval()
        totals = self._processes.sum(totals).double()
        norm = self._optimizer.clip()
        *sums_of_step, num_slots = totals.sum(0).tolist()
        losses = {
            name: value / supervised for name, value in zip(StepSums._fields, sums_of_step, strict=True)
        }
        self._check(losses["loss"], norm, totals[:, 0].tolist())
        rate = self._optimizer.step(self.step + 1)
        self.step += 1
        self.tokens += sum(len(batch.input_ids) for batch in batches)
        self.supervised_tokens += supervised
        return self._figures(losses, rate, norm, batches, num_slots) if math.isfinite(norm) else None

    def _accumulate(self, part: Share, weight: float, *, complete: bool) -> tuple[StepSums, int]:
        """Add the gradients of a micro-batch; its sums, and the slots of its attention."""
        packed = PackedBatch(part.batch, self._student.attention_layers, self._device)
        with self._meter.phase("teacher"), self._teacher_outputs(packed) as teacher_outputs:
            targets = self._teacher.targets(part.batch)
        with (
            self._meter.phase("student"),
            self._seeded(part.number),
            self._processes.gradients(self._module, complete=complete),
        ):
            sums: StepSums = self._module(packed, targets, teacher_outputs)
            self._optimizer.backward(sums.loss * weight)
        return StepSums(*(value.detach() for value in sums)), packed.attention.num_slots

    def _teacher_outputs(self, packed: PackedBatch) -> AbstractContextManager[list[Tensor]]:
        """The teacher's outputs that the loss of hidden states asks for, once the teacher has run in it."""
        if self._hidden is None or self._decoder is None:
            return nullcontext([])
        return layer_outputs(self._decoder, self._hidden.teacher_layers, packed.target_index)

    @contextmanager
    def _seeded(self, micro_batch: int) -> Iterator[None]:
        """Random numbers in here depend on seed, step and micro-batch: on no step before, and no process."""
        (seed,) = np.random.SeedSequence([self._seed, self.step, micro_batch]).generate_state(1, np.uint64)
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(int(seed) >> 1)
            yield

    def _check(self, loss: float, grad_norm: float, losses: Sequence[float]) -> None:
        """Stop before a step that would destroy the weights."""
        if math.isfinite(loss) and (math.isfinite(grad_norm) or self._optimizer.may_overflow):
            return
        to_blame = [number for number, value in enumerate(losses) if not math.isfinite(value)]
        raise DivergedError(
            f"diverged at step {self.step + 1}: loss {loss}, gradient norm {grad_norm}",
            to_blame or range(len(losses)),
        )

    def _figures(
        self,
        losses: Mapping[str, float],
        rate: float,
        norm: float,
        batches: "Sequence[TrainBatch]",
        num_slots: float,
    ) -> TrainStep:
        speed = self._meter.stop(batches, num_slots, teacher_flops=self._teacher.flops(batches))
        return TrainStep(
            step=self.step,
            num_steps=self._num_steps,
            tokens=self.tokens,
            supervised_tokens=self.supervised_tokens,
            loss=losses["loss"],
            kd_loss=losses["kd"],
            ce_loss=losses["ce"] if self._loss.ce_weight else None,
            hidden_loss=None if self._hidden is None else losses["hidden"],
            learning_rate=rate,
            grad_norm=norm,
            **asdict(speed),
        )


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of `train.dtype`; "auto" is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
