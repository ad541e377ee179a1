"""Output of a given form: which tokens may come next, by llguidance's grammars over a model's tokens."""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tessera_cli.engine.sampling_params import StructuredOutput
from tessera_cli.errors import UsageError

if TYPE_CHECKING:
    # Imported where it is first needed: most runs never ask for a form.
    from llguidance import LLMatcher, LLTokenizer

Bitmask = NDArray[np.uint8]

# llguidance draws the place in the grammar below its message, and may append its state.
_AFTER_MESSAGE = re.compile(r"\n\s*\d+ \||\n<")


def bitmask_bytes(vocab_size: int) -> int:
    """The bytes that hold one bit per token id."""
    return -(-vocab_size // 8)


class Matcher:
    """How far one sequence's output has followed its grammar.

    Only tokens that the mask allowed may be accepted. A failure inside llguidance (a grammar too complex for
    its limits) makes `error` a message and allows nothing more.
    """

    def __init__(self, matcher: "LLMatcher", masked_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._masked_ids = masked_ids

    @property
    def error(self) -> str | None:
        """Why no token can follow, in one line; None while all is well."""
        return _one_line(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete and no text can follow.

        The mask then allows the end-of-sequence tokens alone. A model that has none is to be stopped here.
        """
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fill_mask(self, row: Bitmask) -> None:
        """Write one bit per token id into `row`, uint8 [bitmask_bytes], lowest bit first; 1 is allowed.

        Ids beyond the tokenizer's are not allowed; end-of-sequence tokens are where the form is complete.
        """
        mask = self._matcher.compute_bitmask()
        # Looked at afterwards, for the mask itself may be what fails. llguidance then allows the end, and a
        # broken answer would look like a whole one.
        if self._matcher.is_error():
            row[:] = 0
            return
        row[:] = np.frombuffer(mask, dtype=np.uint8)[: len(row)]
        for token in self._masked_ids:
            row[token // 8] &= 0xFF ^ (1 << token % 8)

    def accept(self, token: int) -> None:
        """Go on behind `token`, end-of-sequence tokens included."""
        self._matcher.consume_token(token)

    def fork(self) -> "Matcher":
        """Another matcher at the same place, for another sample of the same prompt."""
        return Matcher(self._matcher.deep_copy(), self._masked_ids)


class GrammarVocabulary:
    """A model's tokens as llguidance wants them; read when the first grammar is compiled, half a second."""

    def __init__(self, tokenizer_file: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Use `tokenizer_file`, a tokenizer.json, for a model of `vocab_size` ids, padding included."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)

    def compile(self, form: StructuredOutput) -> Matcher:
        """A matcher at the start of an output of this form.

        Raises:
            UsageError: the form means nothing to llguidance, or the tokenizer cannot be used for forms.
        """
        from llguidance import LLMatcher

        tokenizer = self._tokenizer
        matcher = LLMatcher(tokenizer, _grammar_of(form), log_level=0)
        if matcher.is_error():
            (name,) = (name for name, value in vars(form).items() if value)
            raise UsageError(
                f"{name} cannot be compiled: {_one_line(matcher.get_error())}",
                hint="the forms are those of llguidance: https://github.com/guidance-ai/llguidance",
                param=name,
            )
        # llguidance insists on an end-of-sequence token; one that the model does not have is never sampled.
        return Matcher(matcher, () if self._eos_token_ids else tuple(tokenizer.eos_tokens))

    @cached_property
    def _tokenizer(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(
                str(self._tokenizer_file), n_vocab=self._vocab_size, eos_token=self._eos_token_ids or None
            )
        except ValueError as error:
            raise UsageError(
                f"structured output cannot use {self._tokenizer_file}: {_one_line(str(error))}",
                hint="leave out structured_output for this model",
                param="structured_output",
            ) from error


def _grammar_of(form: StructuredOutput) -> str:
    from llguidance import LLMatcher

    if form.json_schema is not None or form.json_object:
        schema = '{"type": "object"}' if form.json_schema is None else str(form.json_schema)
        # No free whitespace, which small models fill an answer with; spaces are those of `json.dumps`.
        return LLMatcher.grammar_from_json_schema(
            schema, defaults={"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        )
    if form.regex is not None:
        return LLMatcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(_quoted, form.choice)))
    assert form.grammar is not None, "StructuredOutput has exactly one field"
    return LLMatcher.grammar_from_lark(form.grammar)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _one_line(message: str) -> str:
    return " ".join(_AFTER_MESSAGE.split(message, maxsplit=1)[0].split())
