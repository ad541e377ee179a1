"""Which documents every optimiser step sees, known before the run and from any step on.

An epoch is a permutation of the documents, drawn from (seed, epoch); of a stream, one that a buffer can make.
Whole documents fill rows in that order; rows of all epochs form one stream; `micro_batch_size` rows are a
micro-batch and `gradient_accumulation_steps` micro-batches are an optimiser step. Only the last step of a run
can be smaller.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

import numpy as np

from tessera_cli.recipe.data_section import DataSection
from tessera_cli.recipe.train_section import TrainSection

Row = tuple[int, ...]
MicroBatch = tuple[Row, ...]
Step = tuple[MicroBatch, ...]

# Documents that are counted one by one, in a second or so, where what comes after them may be estimated.
MOST_COUNTED = 200_000


def epoch_order(num_documents: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of the documents that depends on nothing but its arguments."""
    return np.random.default_rng([seed, epoch]).permutation(num_documents).tolist()


def buffered_order(numbers: Iterable[int], buffer_size: int, *, seed: int, epoch: int) -> Iterator[int]:
    """`numbers` in a random order for which `buffer_size` of them are held at any time.

    As `datasets` shuffles a stream: each one drawn makes room for the next. It depends on nothing but its
    arguments, and on none of `numbers` after those that it has taken.
    """
    random = np.random.default_rng([seed, epoch])
    rest = iter(numbers)
    held = list(islice(rest, buffer_size))
    for number in rest:
        place = int(random.integers(len(held)))
        yield held[place]
        held[place] = number
    yield from (held[place] for place in random.permutation(len(held)).tolist())


def pack_rows(
    order: Iterable[int], row_tokens: Sequence[int], *, max_seq_len: int, packing: bool
) -> Iterator[Row]:
    """Fill rows with whole documents in `order`; document `i` takes `row_tokens[i]` <= `max_seq_len` tokens.

    A row is closed when the next document does not fit; without `packing` every document has its own.
    """
    row: list[int] = []
    used = 0
    for document in order:
        if row and (not packing or used + row_tokens[document] > max_seq_len):
            yield tuple(row)
            row, used = [], 0
        row.append(document)
        used += row_tokens[document]
    if row:
        yield tuple(row)


class Documents(Protocol):
    """What is known of each document: tokens, targets, and the tokens that a row keeps free for it."""

    @property
    def lengths(self) -> Sequence[int]: ...
    @property
    def supervised(self) -> Sequence[int]: ...
    @property
    def row_tokens(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class StepPlan:
    """The exact course of a run over documents of given `lengths` and `supervised` token counts.

    Attributes:
        num_steps: optimiser steps.
        num_tokens: tokens that pass through the student.
        num_supervised_tokens: those of them that are targets.
        num_epochs: passes over the documents, a part counted as a part.
        is_estimate: only the first `MOST_COUNTED` documents were counted, the others taken to be like these.
    """

    lengths: Sequence[int]
    supervised: Sequence[int]
    row_tokens: Sequence[int]
    data: DataSection
    train: TrainSection
    seed: int
    num_steps: int
    num_tokens: int
    num_supervised_tokens: int
    num_epochs: float
    is_estimate: bool = False

    @classmethod
    def of(
        cls,
        documents: Documents,
        *,
        data: DataSection,
        train: TrainSection,
        seed: int,
        first_epoch: Iterable[int] | None = None,
        estimate: bool = False,
    ) -> "StepPlan":
        """Walk through the run once, on lengths only, and count.

        `first_epoch` reads the `documents` of a stream, of which there are none before it. `estimate` lets
        all figures of a long run be estimates; where `max_steps` says the number of steps, the other figures
        are so in any case.
        """
        lengths, supervised = documents.lengths, documents.supervised
        row_tokens = documents.row_tokens
        num_steps = num_tokens = num_supervised = num_documents = 0
        may_estimate = estimate or train.max_steps is not None
        rest = 1.0
        for step in _steps(row_tokens, data, train, seed, first_epoch):
            numbers = numbers_of(step)
            num_steps += 1
            num_documents += len(numbers)
            num_tokens += sum(lengths[number] for number in numbers)
            num_supervised += sum(supervised[number] for number in numbers)
            if num_steps == train.max_steps or (train.max_tokens and num_tokens >= train.max_tokens):
                break
            # The second pass has begun, so a stream is read to its end.
            if may_estimate and num_documents > max(MOST_COUNTED, len(lengths)):
                rest = _whole_run(train, num_steps, num_tokens, num_documents / len(lengths))
                break
        return cls(
            lengths=lengths,
            supervised=supervised,
            row_tokens=row_tokens,
            data=data,
            train=train,
            seed=seed,
            num_steps=train.max_steps or round(rest * num_steps),
            num_tokens=round(rest * num_tokens),
            num_supervised_tokens=round(rest * num_supervised),
            num_epochs=rest * num_documents / len(lengths),
            is_estimate=rest != 1.0,
        )

    def steps(self, start: int = 0) -> Iterator[Step]:
        """The steps after the first `start`, each as the documents of its rows, by number."""
        return islice(_steps(self.row_tokens, self.data, self.train, self.seed), start, self.num_steps)


def _whole_run(train: TrainSection, num_steps: int, num_tokens: int, num_epochs: float) -> float:
    """The length of the run by that of its beginning, of which these are the counts."""
    if train.max_steps is not None:
        return train.max_steps / num_steps
    if train.max_tokens is not None:
        return train.max_tokens / num_tokens
    return (train.num_epochs or 0) / num_epochs


def numbers_of(step: Step) -> list[int]:
    """The documents of a step, in its order."""
    return [number for micro_batch in step for row in micro_batch for number in row]


def _steps(
    row_tokens: Sequence[int],
    data: DataSection,
    train: TrainSection,
    seed: int,
    first_epoch: Iterable[int] | None = None,
) -> Iterator[Step]:
    rows = _rows(row_tokens, data, train, seed, first_epoch)
    micro_batches = iter(lambda: tuple(islice(rows, train.micro_batch_size)), ())
    return iter(lambda: tuple(islice(micro_batches, train.gradient_accumulation_steps)), ())


def _rows(
    row_tokens: Sequence[int],
    data: DataSection,
    train: TrainSection,
    seed: int,
    first_epoch: Iterable[int] | None,
) -> Iterator[Row]:
    for epoch in range(train.num_epochs) if train.num_epochs else count():
        order: Iterable[int]
        if data.shuffle_buffer is None:
            order = epoch_order(len(row_tokens), seed=seed, epoch=epoch)
        else:
            numbers = first_epoch if epoch == 0 and first_epoch is not None else range(len(row_tokens))
            order = buffered_order(numbers, data.shuffle_buffer, seed=seed, epoch=epoch)
        yield from pack_rows(order, row_tokens, max_seq_len=data.max_seq_len, packing=data.packing)
