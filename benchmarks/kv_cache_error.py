"""What each dtype of the KV cache costs: on random data, and in the words of a real model.

python benchmarks/kv_cache_error.py MODEL_DIRECTORY recipes/data/eval.jsonl
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.kernels.backend import AttentionMetadata
from tessera_cli.kernels.kv_cache import KV_CACHE_DTYPES, kv_block_bytes
from tessera_cli.kernels.reference import ReferenceAttention
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder

BLOCK_SIZE = 16
NUM_TOKENS = 1000  # of the model's text, about


def main() -> None:
    """Print a row for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    arguments = parser.parse_args()
    decoder = load_decoder(arguments.model, dtype=torch.float32)
    documents = read_documents(arguments.model, arguments.data)
    exact = log_probabilities(decoder, documents, torch.float32)
    print(f"{sum(map(len, documents))} tokens of {len(documents)} documents")
    print("dtype      bytes/token  random: error   text: mean KL   largest KL  same first choice")
    for name, dtype in KV_CACHE_DTYPES.items():
        token_bytes = kv_block_bytes(decoder.attention_layers, block_size=1, dtype=dtype)
        other = log_probabilities(decoder, documents, dtype)
        kl = (exact.exp() * (exact - other)).sum(-1)
        agreement = (exact.argmax(-1) == other.argmax(-1)).double().mean()
        print(
            f"{name:10} {token_bytes:11,} {random_error(dtype):14.1e} {kl.mean():15.1e} {kl.max():12.1e}"
            f" {agreement:18.1%}"
        )


def random_error(dtype: torch.dtype) -> float:
    """||out - exact|| / ||exact|| of a prefill of 1,024 tokens with normal queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1024, heads, 64, generator=generator) for heads in (9, 3, 3))
    layers = [AttentionLayer(9, 3, 64, 64**-0.5, None, None)]
    exact, out = (prefill(layers, 1024, stored)(0, q, k, v) for stored in (torch.float32, dtype))
    return float((out - exact).norm() / exact.norm())


def read_documents(model: Path, data: Path) -> list[list[int]]:
    """Token ids of the first conversations of a JSON-lines file, in ChatML."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    documents: list[list[int]] = []
    for line in data.read_text(encoding="utf-8").splitlines():
        if sum(map(len, documents)) >= NUM_TOKENS:
            break
        turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in json.loads(line)["messages"]]
        documents.append(tokenizer.encode("".join(turns), add_special_tokens=False).ids)
    return documents


@torch.inference_mode()
def log_probabilities(decoder: Decoder, documents: list[list[int]], dtype: torch.dtype) -> Tensor:
    """Float64 [tokens, vocab] after each token of each document, over a cache of `dtype`."""
    rows = []
    for ids in documents:
        attend = prefill(decoder.attention_layers, len(ids), dtype)
        hidden = decoder(torch.tensor(ids), torch.arange(len(ids)), attend)
        rows.append(decoder.logits(hidden).double().log_softmax(-1))
    return torch.cat(rows)


def prefill(layers: Sequence[AttentionLayer], length: int, dtype: torch.dtype) -> partial[Tensor]:
    """Attention of one sequence of `length` tokens, through an empty cache."""
    num_blocks = -(-length // BLOCK_SIZE)
    attention = ReferenceAttention(
        layers,
        num_blocks=num_blocks + 1,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        kv_cache_dtype=dtype,
        device="cpu",
    )
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        block_tables=torch.arange(1, num_blocks + 1, dtype=torch.int32)[None],
        slot_mapping=torch.arange(BLOCK_SIZE, BLOCK_SIZE + length),
        max_query_len=length,
        max_seq_len=length,
    )
    return partial(attention.attend, metadata)


if __name__ == "__main__":
    main()
