"""What int8 weights cost: a model beside its quantised self, on documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tessera_cli.distill.data.corpus import TrainBatch, load_corpus
from tessera_cli.distill.evaluation.evaluate import held_out_batches
from tessera_cli.distill.losses.dense import forward_kl
from tessera_cli.distill.students.student import forward_batch
from tessera_cli.engine.loading import load_served_model
from tessera_cli.kernels.backend import select_backend
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.data_section import DataSource

# Tokens of a document, of a batch, and whose logits are made at once.
MAX_SEQ_LEN = 1024
ROWS_PER_BATCH = 4
CHUNK_TOKENS = 256


@dataclass(frozen=True)
class QuantizationCost:
    """Means over `num_tokens` tokens, each predicted from what precedes it.

    Attributes:
        kl: KL(float32 ‖ int8), nats.
        top1_agreement: the share of tokens at which both prefer the same one.
        float32_perplexity: of the documents.
        int8_perplexity: of the documents.
    """

    num_tokens: int
    kl: float
    top1_agreement: float
    float32_perplexity: float
    int8_perplexity: float


def read_documents(
    model: Path,
    file: Path,
    data_format: Literal["text", "messages", "prompt_completion"],
    *,
    max_tokens: int,
) -> tuple[list[TrainBatch], list[str]]:
    """Whole documents of `file` with up to `max_tokens` tokens to predict; and what was left out, and why.

    Raises:
        ModelError: the model directory has no config or no tokenizer.
        DataError: documents that cannot be read.
    """
    tokenizer = Tokenizer.from_dir(model)
    max_seq_len = min(MAX_SEQ_LEN, ModelConfig.from_dir(model).max_position_embeddings)
    source = DataSource(path=str(file), format=data_format)
    corpus = load_corpus([source], tokenizer, max_seq_len=max_seq_len, train_on="all")
    batches = held_out_batches(
        corpus.documents, max_targets=max_tokens, max_seq_len=max_seq_len, rows_per_batch=ROWS_PER_BATCH
    )
    return batches, corpus.notes(str(file))


def quantization_cost(model: Path, int8_model: Path, batches: Sequence[TrainBatch]) -> QuantizationCost:
    """Compare two model directories on the CPU: the first in float32, the second as the engine runs it.

    Raises:
        ModelError: one of them is broken.
    """
    plain = load_decoder(model, dtype=torch.float32)
    backend, _ = select_backend("auto", "cpu", layers=plain.attention_layers)
    quantised = load_served_model(int8_model, torch.float32, "cpu", "int8", backend)
    assert isinstance(quantised, Decoder)
    return compare_decoders(plain, quantised, batches)


@torch.inference_mode()
def compare_decoders(plain: Decoder, quantised: Decoder, batches: Sequence[TrainBatch]) -> QuantizationCost:
    """Compare a decoder with another one that has its weights in a coarser form."""
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in batches:
        hidden = (forward_batch(decoder, batch)[batch.target_index] for decoder in (plain, quantised))
        chunks = zip(*(rows.split(CHUNK_TOKENS) for rows in hidden), strict=True)
        for (first, second), targets in zip(chunks, batch.target_ids.split(CHUNK_TOKENS), strict=True):
            sums += _compare(plain.logits(first), quantised.logits(second), targets)
    num_tokens = sum(len(batch.target_ids) for batch in batches)
    kl, agreement, nll, int8_nll = (sums / num_tokens).tolist()
    return QuantizationCost(num_tokens, kl, agreement, exp(nll), exp(int8_nll))


def _compare(plain: Tensor, quantised: Tensor, target_ids: Tensor) -> Tensor:
    """Sums over a chunk, float64 [4]: KL, agreement, both negative log-likelihoods; logits [n, vocab]."""
    plain, quantised = plain.log_softmax(-1), quantised.log_softmax(-1)
    targets = target_ids[:, None]
    per_token = (
        forward_kl(plain, quantised),
        plain.argmax(-1) == quantised.argmax(-1),
        -plain.gather(1, targets)[:, 0],
        -quantised.gather(1, targets)[:, 0],
    )
    return torch.stack([values.double().sum() for values in per_token])
