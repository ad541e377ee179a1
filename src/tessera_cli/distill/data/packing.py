"""Which documents every optimiser step sees, known before the run and from any step on.

An epoch is a permutation of the documents, drawn from (seed, epoch). Whole documents fill rows in that
order; rows of all epochs form one stream; `micro_batch_size` rows are a micro-batch and
`gradient_accumulation_steps` micro-batches are an optimiser step. Only the last step of a run can be
smaller.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from tessera_cli.recipe.data_section import DataSection
from tessera_cli.recipe.train_section import TrainSection

Row = tuple[int, ...]
MicroBatch = tuple[Row, ...]
Step = tuple[MicroBatch, ...]


def epoch_order(num_documents: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of the documents that depends on nothing but its arguments."""
    return np.random.default_rng([seed, epoch]).permutation(num_documents).tolist()


def pack_rows(order: Sequence[int], lengths: Sequence[int], *, max_seq_len: int, packing: bool) -> list[Row]:
    """Fill rows with whole documents in `order`; document `i` has `lengths[i]` <= `max_seq_len` tokens.

    A row is closed when the next document does not fit; without `packing` every document has its own.
    """
    rows: list[Row] = []
    row: list[int] = []
    used = 0
    for document in order:
        if row and (not packing or used + lengths[document] > max_seq_len):
            rows.append(tuple(row))
            row, used = [], 0
        row.append(document)
        used += lengths[document]
    if row:
        rows.append(tuple(row))
    return rows


@dataclass(frozen=True)
class StepPlan:
    """The exact course of a run over documents of given `lengths` and `supervised` token counts.

    Attributes:
        num_steps: optimiser steps.
        num_tokens: tokens that pass through the student.
        num_supervised_tokens: those of them that are targets.
        num_epochs: passes over the documents, a part counted as a part.
    """

    lengths: tuple[int, ...]
    supervised: tuple[int, ...]
    data: DataSection
    train: TrainSection
    seed: int
    num_steps: int
    num_tokens: int
    num_supervised_tokens: int
    num_epochs: float

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        supervised: Sequence[int],
        *,
        data: DataSection,
        train: TrainSection,
        seed: int,
    ) -> "StepPlan":
        """Walk through the run once, on lengths only, and count."""
        num_steps = num_tokens = num_supervised = num_documents = 0
        for step in _steps(lengths, data, train, seed):
            documents = [document for micro_batch in step for row in micro_batch for document in row]
            num_steps += 1
            num_documents += len(documents)
            num_tokens += sum(lengths[document] for document in documents)
            num_supervised += sum(supervised[document] for document in documents)
            if num_steps == train.max_steps or (train.max_tokens and num_tokens >= train.max_tokens):
                break
        return cls(
            lengths=tuple(lengths),
            supervised=tuple(supervised),
            data=data,
            train=train,
            seed=seed,
            num_steps=num_steps,
            num_tokens=num_tokens,
            num_supervised_tokens=num_supervised,
            num_epochs=num_documents / len(lengths),
        )

    def steps(self, start: int = 0) -> Iterator[Step]:
        """The steps after the first `start`, each as the documents of its rows, by number."""
        return islice(_steps(self.lengths, self.data, self.train, self.seed), start, self.num_steps)


def _steps(lengths: Sequence[int], data: DataSection, train: TrainSection, seed: int) -> Iterator[Step]:
    rows = _rows(lengths, data, train, seed)
    micro_batches = iter(lambda: tuple(islice(rows, train.micro_batch_size)), ())
    return iter(lambda: tuple(islice(micro_batches, train.gradient_accumulation_steps)), ())


def _rows(lengths: Sequence[int], data: DataSection, train: TrainSection, seed: int) -> Iterator[Row]:
    for epoch in range(train.num_epochs) if train.num_epochs else count():
        order = epoch_order(len(lengths), seed=seed, epoch=epoch)
        yield from pack_rows(order, lengths, max_seq_len=data.max_seq_len, packing=data.packing)
