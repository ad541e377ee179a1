"""Documents of a recipe, tokenised, and the packed batches that both models run on.

Planning a run reads documents too, so torch is loaded only where a batch is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tessera_cli.distill.data.rendering import encode_row
from tessera_cli.distill.data.sources import read_rows
from tessera_cli.errors import DataError, ModelError
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.data_section import DataSource

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Document:
    """One tokenised document: ids (int32) and whether each token is a target (bool), both `[num_tokens]`."""

    token_ids: np.ndarray
    supervised: np.ndarray

    @property
    def num_supervised_tokens(self) -> int:
        return int(self.supervised.sum())


@dataclass(frozen=True, eq=False)
class Corpus:
    """The documents of some files, in the files' order.

    `num_too_long` documents have more than `max_seq_len` tokens and `num_unsupervised` have no target: both
    are left out, whole.
    """

    documents: tuple[Document, ...]
    max_seq_len: int
    num_too_long: int
    num_unsupervised: int

    @property
    def num_tokens(self) -> int:
        return sum(len(document.token_ids) for document in self.documents)

    @property
    def num_supervised_tokens(self) -> int:
        return sum(document.num_supervised_tokens for document in self.documents)

    def notes(self, split: str) -> list[str]:
        """One line for each reason that documents of `split` were left out for."""
        notes = []
        if self.num_too_long:
            notes.append(
                f"{split}: {self.num_too_long} of {self._num_read} documents are longer than "
                f"data.max_seq_len {self.max_seq_len} and are left out"
            )
        if self.num_unsupervised:
            notes.append(
                f"{split}: {self.num_unsupervised} of {self._num_read} documents have no token to learn "
                "and are left out"
            )
        return notes

    def fingerprint(self) -> str:
        """SHA-256 over what is trained on: ids, targets and order."""
        digest = hashlib.sha256()
        for document in self.documents:
            digest.update(len(document.token_ids).to_bytes(8, "little"))
            digest.update(document.token_ids.astype("<i4").tobytes())
            digest.update(np.packbits(document.supervised).tobytes())
        return digest.hexdigest()

    @property
    def _num_read(self) -> int:
        return len(self.documents) + self.num_too_long + self.num_unsupervised


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
    train_on: Literal["completion", "all"],
) -> Corpus:
    """Read and tokenise `sources`.

    Raises:
        DataError: a file or a row is not what its format says, or no document is left to learn from.
    """
    documents: list[Document] = []
    num_too_long = num_unsupervised = 0
    for source in sources:
        for where, row in read_rows(Path(source.path), source.format):
            document = _encode(row, where, source, tokenizer, train_on)
            if len(document.token_ids) > max_seq_len:
                num_too_long += 1
            elif not document.supervised.any():
                num_unsupervised += 1
            else:
                documents.append(document)
    corpus = Corpus(tuple(documents), max_seq_len, num_too_long, num_unsupervised)
    if not documents:
        names = ", ".join(source.path for source in sources)
        raise DataError(
            f"{names}: nothing to learn from; {num_too_long} documents are longer than data.max_seq_len "
            f"{max_seq_len}, {num_unsupervised} have no supervised token",
            hint="raise `data.max_seq_len`, or supervise every token with `data.train_on: all`",
        )
    return corpus


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


def _encode(
    row: dict[str, Any],
    where: str,
    source: DataSource,
    tokenizer: Tokenizer,
    train_on: Literal["completion", "all"],
) -> Document:
    try:
        token_ids, supervised = encode_row(row, source.format, tokenizer, train_on)
    except (DataError, ModelError) as error:  # a template can fail at one conversation
        raise type(error)(f"{where}: {error.message}", hint=error.hint) from error
    if token_ids.size and int(token_ids.max()) >= tokenizer.vocab_size:
        raise DataError(f"{where}: the tokenizer made an id beyond its vocabulary")
    return Document(token_ids, supervised)
