"""Documents of a recipe, tokenised, and the packed batches that both models run on.

Planning a run reads documents too, so torch is loaded only where a batch is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tessera_cli.distill.data.document import Document, TrainOn, encode_document
from tessera_cli.distill.data.intake import Intake
from tessera_cli.distill.data.sources import read_rows
from tessera_cli.distill.data.teacher_written import Prompt, PromptSet, Writer
from tessera_cli.errors import DataError
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.data_section import DataSource
from tessera_cli.recipe.sampling_section import SamplingSection

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of some sources, in the sources' order, and what was left out.

    `prompt_sets` are those that the teacher answers. Where one is not complete, documents that have each of
    its prompts and the longest possible answer stand in for it: for counting, never for training.
    """

    documents: tuple[Document, ...]
    intake: Intake
    prompt_sets: tuple[PromptSet, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_supervised_tokens(self) -> int:
        return sum(self.supervised)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [len(document.token_ids) for document in self.documents]

    @property
    def supervised(self) -> list[int]:
        """Targets of each document."""
        return [document.num_supervised_tokens for document in self.documents]

    @property
    def row_tokens(self) -> list[int]:
        """What a row keeps free for each document."""
        return [self.intake.row_tokens(document) for document in self.documents]

    @property
    def unanswered(self) -> tuple[PromptSet, ...]:
        """The prompts that the teacher still has to answer."""
        return tuple(prompts for prompts in self.prompt_sets if not prompts.is_complete)

    def in_order(self, groups: Iterable[Sequence[int]], start: int = 0) -> Iterator[list[Document]]:
        """The documents of each group of numbers after the first `start` groups."""
        for number, group in enumerate(groups):
            if number >= start:
                yield [self.documents[index] for index in group]

    def having(self, contents: frozenset[bytes]) -> frozenset[bytes]:
        """Those of `contents`, see `Document.content`, that are of one of the documents."""
        return contents & {document.content for document in self.documents}

    def notes(self, split: str) -> list[str]:
        """What the user should know of the documents of `split`."""
        notes = self.intake.notes(split)
        for prompts in self.unanswered:
            notes.append(
                f"{split}: the teacher has {len(prompts.prompts):,} prompts of {prompts.place} to answer; "
                f"until then each counts with {prompts.sampling.max_tokens} tokens of answer"
            )
        return notes

    def fingerprint(self) -> str:
        """SHA-256 over what is trained on: ids, targets and order."""
        digest = hashlib.sha256()
        for document in self.documents:
            add_to_fingerprint(digest, document)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class TrainBatch:
    """Documents one after the other, without padding.

    `input_ids` and `positions` are int64 `[num_tokens]`, positions restarting at 0 with each document;
    document `i` is `cu_seqlens[i]:cu_seqlens[i + 1]`. `target_index` (int64 `[num_targets]`) are the places
    whose next token, in the same document, is supervised, and `target_ids` are those tokens.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: list[int]
    target_index: torch.Tensor
    target_ids: torch.Tensor


def load_corpus(
    sources: Sequence[DataSource],
    tokenizer: Tokenizer,
    *,
    max_seq_len: int,
    train_on: TrainOn,
    answer_tokens: int | None = None,
    writer: Writer | None = None,
) -> Corpus:
    """Read and tokenise `sources`.

    `answer_tokens` is what the student's own answers may have, where it gives any. `writer` is needed for
    sources that the teacher answers.

    Raises:
        DataError: a file or a row is not what its format says, or no document is left to learn from.
    """
    documents: list[Document] = []
    prompt_sets: list[PromptSet] = []
    intake = Intake(max_seq_len, answer_tokens)
    for source in sources:
        rows: Iterator[Document] = (
            encode_document(row, where, source, tokenizer, train_on) for where, row in read_rows(source)
        )
        if source.sampling is not None:
            if writer is None:
                raise ValueError(f"{source.place} needs its writer")
            prompt_sets.append(_prompt_set(source, rows, source.sampling, intake, writer))
            rows = _answered(prompt_sets[-1], intake, train_on)
        documents += filter(intake.takes, rows)
    check_not_empty(sources, intake)
    return Corpus(tuple(documents), intake, tuple(prompt_sets))


def check_not_empty(sources: Sequence[DataSource], intake: Intake) -> None:
    """See that there is something to learn, and something to answer where the student answers.

    Raises:
        DataError: there is not.
    """
    names = ", ".join(source.place for source in sources)
    if intake.num_taken == 0:
        why = "; ".join(intake.notes(names)) or f"{names}: no documents"
        raise DataError(
            f"nothing to learn from: {why}",
            hint="raise `data.max_seq_len`, or supervise every token with `data.train_on: all`",
        )
    if intake.answer_tokens is not None and intake.num_without_prompt == intake.num_taken:
        raise DataError(
            f"{names}: no document has a prompt that the student could answer",
            hint="use messages, prompt_completion or prompts, or remove `data.on_policy`",
        )


def build_batch(documents: Iterable[Document]) -> TrainBatch:
    """Lay `documents` end to end."""
    import torch

    documents = list(documents)
    lengths = [len(document.token_ids) for document in documents]
    cu_seqlens = np.cumsum([0, *lengths])
    input_ids = np.concatenate([document.token_ids for document in documents]).astype(np.int64)
    supervised = np.concatenate([document.supervised for document in documents])
    # A document's first token is never supervised, so no place predicts across a boundary.
    target_index = np.flatnonzero(supervised) - 1
    return TrainBatch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths])),
        cu_seqlens=cu_seqlens.tolist(),
        target_index=torch.from_numpy(target_index),
        target_ids=torch.from_numpy(input_ids[target_index + 1]),
    )


def add_to_fingerprint(digest: hashlib._Hash, document: Document) -> None:
    """Let `digest` depend on the ids and targets of `document`."""
    digest.update(len(document.token_ids).to_bytes(8, "little"))
    digest.update(document.token_ids.astype("<i4").tobytes())
    digest.update(np.packbits(document.supervised).tobytes())


def _prompt_set(
    source: DataSource, rows: Iterable[Document], sampling: SamplingSection, intake: Intake, writer: Writer
) -> PromptSet:
    """The prompts that leave a row room for a whole answer; the others are counted."""
    prompts = []
    for index, document in enumerate(rows):
        if len(document.token_ids) + sampling.max_tokens > intake.max_seq_len:
            intake.num_read += 1
            intake.num_without_room += 1
        else:
            prompts.append(Prompt(index, document.token_ids.tolist()))
    return PromptSet.of(source.place, prompts, sampling, writer)


def _answered(prompts: PromptSet, intake: Intake, train_on: TrainOn) -> Iterator[Document]:
    answers = prompts.answers() if prompts.is_complete else None
    for prompt in prompts.prompts:
        if answers is None:
            yield Document.answered(prompt.token_ids, [0] * prompts.sampling.max_tokens, train_on)
            continue
        answer = answers[prompt.index]
        intake.num_cut += answer.finish_reason == "length"
        yield Document.answered(prompt.token_ids, answer.token_ids, train_on)
