"""The bytes of single tokens, which text alone cannot show: a token may hold part of a character."""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """From token id to the bytes that the tokenizer's decoder makes of it.

    Knows the two ways in which byte-level vocabularies are written: characters that stand for bytes (GPT-2),
    and ``<0x0A>`` beside ``▁`` for a space (SentencePiece). Any other token is its own text in UTF-8.
    """

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        # An added token is written as it reads.
        self._added = {token_id: token.content for token_id, token in fast.get_added_tokens_decoder().items()}
        # A decoder's state is its part of tokenizer.json.
        kinds = set() if fast.decoder is None else set(_kinds(json.loads(fast.decoder.__getstate__())))
        self._bytes_of_characters = _gpt2_bytes() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self._marks_spaces = bool(kinds & {"Metaspace", "Replace"})

    @classmethod
    def from_dir(cls, path: Path) -> "TokenBytes":
        """The bytes of the tokens of `path/tokenizer.json`, which a `Tokenizer` has read before."""
        return cls(FastTokenizer.from_file(str(path / "tokenizer.json")))

    def __call__(self, token_id: int) -> bytes:
        """The bytes of `token_id`; none of an id that the tokenizer does not know (a padded vocabulary)."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        if self._bytes_of_characters is not None:
            if all(character in self._bytes_of_characters for character in token):
                return bytes(self._bytes_of_characters[character] for character in token)
            return token.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return (token.replace("▁", " ") if self._marks_spaces else token).encode()


def _kinds(decoder: Any) -> list[str]:
    """The `type` of a decoder and of those that it is a sequence of."""
    return [decoder["type"]] + [kind for inner in decoder.get("decoders", ()) for kind in _kinds(inner)]


def _gpt2_bytes() -> dict[str, int]:
    """GPT-2's alphabet: a printable byte stands for itself, the others are numbered from U+0100 on.

    Source: Radford et al. 2019, the byte-level encoding of the released model.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }
