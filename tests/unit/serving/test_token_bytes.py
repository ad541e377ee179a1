"""Bytes of tokens: together they are the text, in each way of writing a byte-level vocabulary."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tessera_cli.serving.token_bytes import TokenBytes

TEXT = "naïve 👩‍👩‍👧 日本語 🚀!\n\t x"


def test_the_bytes_of_a_byte_level_vocabulary_make_up_the_text(tiny_model_dir: Path) -> None:
    fast = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    token_bytes = TokenBytes.from_dir(tiny_model_dir)
    parts = [token_bytes(token_id) for token_id in fast.encode(TEXT, add_special_tokens=False).ids]
    assert b"".join(parts) == TEXT.encode()
    assert len(parts) > len(TEXT)  # some hold no whole character
    assert token_bytes(fast.token_to_id("<|im_end|>")) == b"<|im_end|>"


def test_every_byte_has_its_token(tiny_model_dir: Path) -> None:
    fast = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    token_bytes = TokenBytes(fast)
    singles = {token_bytes(fast.token_to_id(letter)) for letter in pre_tokenizers.ByteLevel.alphabet()}
    assert singles == {bytes([byte]) for byte in range(256)}


def sentencepiece_like() -> Tokenizer:
    vocabulary = {"<unk>": 0, "▁a": 1, "b": 2, "<0xF0>": 3, "<0x9F>": 4, "日": 5}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast


@pytest.mark.parametrize(
    ("token_id", "expected"),
    [(1, b" a"), (2, b"b"), (3, b"\xf0"), (4, b"\x9f"), (5, "日".encode()), (99, b"")],
)
def test_sentencepiece_tokens(token_id: int, expected: bytes) -> None:
    assert TokenBytes(sentencepiece_like())(token_id) == expected


def test_without_a_decoder_a_token_is_its_text() -> None:
    fast = Tokenizer(models.WordLevel({"▁a<0x0A>": 0}, unk_token="▁a<0x0A>"))
    assert TokenBytes(fast)(0) == "▁a<0x0A>".encode()
