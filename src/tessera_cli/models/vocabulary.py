"""Vocabularies that are padded: a model with more rows than its tokenizer has ids."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder


def load_first_rows(
    path: Path, num_rows: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Decoder:
    """The decoder in `path` with the first `num_rows` rows of its embedding and its head, or all if as many.

    Raises:
        ModelError: as `load_decoder`.
        ValueError: it has fewer rows.
    """
    return keep_first_rows(load_decoder(path, dtype=dtype, device=device), num_rows)


@torch.no_grad()
def keep_first_rows(decoder: Decoder, num_rows: int) -> Decoder:
    """Drop the other rows of the embedding and the head, in place; tied ones stay tied."""
    if num_rows == decoder.config.vocab_size:
        return decoder
    if num_rows > decoder.config.vocab_size:
        raise ValueError(f"{num_rows} rows of {decoder.config.vocab_size}")
    decoder.config = replace(decoder.config, vocab_size=num_rows)
    embedding = decoder.embed_tokens
    embedding.num_embeddings = num_rows
    # Copies: a view would keep the dropped rows in memory.
    embedding.weight = nn.Parameter(embedding.weight[:num_rows].clone())
    if decoder.lm_head is not None:
        decoder.lm_head.out_features = num_rows
        decoder.lm_head.weight = nn.Parameter(decoder.lm_head.weight[:num_rows].clone())
    return decoder
