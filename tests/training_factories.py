"""Tiny seeded decoders, documents and trainers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tessera_cli.distill.data.corpus import Document, TrainBatch, build_batch
from tessera_cli.distill.events import Listener
from tessera_cli.distill.training.processes import Processes
from tessera_cli.distill.training.trainer import Trainer
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.schema import LossSection
from tessera_cli.recipe.train_section import TrainSection

VOCAB_SIZE = 61


def make_decoder(
    seed: int, *, num_hidden_layers: int = 2, tied: bool = True, dtype: torch.dtype = torch.float32
) -> Decoder:
    """A decoder with grouped queries, whose weights are large enough for its outputs to differ."""
    config = ModelConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_ids=(2,),
        pad_token_id=None,
        dtype="float32",
    )
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.4 * noise)
    return decoder.to(dtype)


def make_documents(lengths: Sequence[int], seed: int = 0) -> list[Document]:
    """Random documents of `lengths` tokens; about half of the tokens and the last one are targets."""
    rng = np.random.default_rng(seed)
    documents = []
    for length in lengths:
        supervised = rng.random(length) < 0.5
        supervised[0], supervised[-1] = False, True
        documents.append(Document(rng.integers(0, VOCAB_SIZE, length, dtype=np.int32), supervised))
    return documents


def make_steps(num_steps: int) -> list[list[TrainBatch]]:
    """Two micro-batches of three documents for each of `num_steps` optimiser steps."""
    return [
        [
            build_batch(make_documents([9, 4, 6], 100 * step)),
            build_batch(make_documents([3, 8, 5], 100 * step + 1)),
        ]
        for step in range(num_steps)
    ]


def make_trainer(
    student: Decoder,
    teacher: Decoder,
    *,
    num_steps: int = 10,
    listener: Listener = lambda event: None,
    loss: dict[str, Any] | None = None,
    **train: Any,
) -> Trainer:
    """A trainer on the CPU; `loss` and `train` are keys of a recipe."""
    return Trainer(
        student,
        teacher,
        loss=LossSection(**(loss or {})),
        train=TrainSection(**{"max_steps": num_steps, **train}),
        num_steps=num_steps,
        processes=Processes("cpu"),
        listener=listener,
    )


def copy_weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    """The decoder's weights as they are now."""
    return {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Every tensor is there on both sides and equal in every bit."""
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different
