"""One tokenised document, and how a row of a data file becomes one."""

import hashlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tessera_cli.distill.data.rendering import encode_prompt, encode_row
from tessera_cli.errors import DataError, ModelError
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.data_section import DataSource

TrainOn = Literal["completion", "all"]


@dataclass(frozen=True, eq=False)
class Document:
    """One tokenised document: ids (int32) and whether each token is a target (bool), both `[num_tokens]`.

    `is_prompt` is one that nobody has answered yet: it ends where an answer begins, and has no target.
    """

    token_ids: np.ndarray
    supervised: np.ndarray
    is_prompt: bool = False

    @property
    def num_supervised_tokens(self) -> int:
        return int(self.supervised.sum())

    @property
    def content(self) -> bytes:
        """A hash of the ids: the same for the same text, whatever of it is supervised."""
        return hashlib.sha256(self.token_ids.astype("<i4").tobytes()).digest()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens before the last answer; 0 where a document has none, or is supervised from its start."""
        if self.is_prompt:
            return len(self.token_ids)
        if not self.supervised.any():
            return 0
        starts = np.flatnonzero(self.supervised[1:] & ~self.supervised[:-1]) + 1
        # The mask of a document without a prompt begins at its second token.
        return int(starts[-1]) if starts[-1] > 1 else 0

    @classmethod
    def answered(
        cls, prompt: np.ndarray | list[int], answer: list[int], train_on: TrainOn = "completion"
    ) -> "Document":
        """A prompt with an answer in the very tokens in which a model gave it."""
        token_ids = np.concatenate([np.asarray(prompt, np.int32), np.asarray(answer, np.int32)])
        supervised = np.full(len(token_ids), train_on == "all")
        supervised[len(prompt) :] = True
        supervised[:1] = False
        return cls(token_ids, supervised)


def encode_document(
    row: dict[str, Any], where: str, source: DataSource, tokenizer: Tokenizer, train_on: TrainOn
) -> Document:
    """Tokenise a row of `source`; `where` is its place.

    Raises:
        DataError: the row is not what the format says; the message names the place.
        ModelError: the chat template fails.
    """
    try:
        if source.format == "prompts":
            token_ids = np.asarray(encode_prompt(row, tokenizer), dtype=np.int32)
            supervised = np.zeros(len(token_ids), dtype=bool)
        else:
            token_ids, supervised = encode_row(row, source.format, tokenizer, train_on)
    except (DataError, ModelError) as error:  # a template can fail at one conversation
        raise type(error)(f"{where}: {error.message}", hint=error.hint) from error
    if token_ids.size and int(token_ids.max()) >= tokenizer.num_ids:
        raise DataError(f"{where}: the tokenizer made an id beyond its vocabulary")
    return Document(token_ids, supervised, is_prompt=source.format == "prompts")
