"""Steps to measure CUDA attention on, and the other implementations that can run them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.kernels.backend import AttentionMetadata

BLOCK_SIZE = 16


@dataclass(frozen=True, eq=False)
class Step:
    """Tensors of one step with random content, and what it costs at least."""

    layer: AttentionLayer
    metadata: AttentionMetadata
    q: Tensor
    k: Tensor
    v: Tensor
    num_blocks: int
    kv_elements: int
    operations: float


def make_step(layer: AttentionLayer, queries: list[int], lengths: list[int]) -> Step:
    """A step in bfloat16 whose blocks lie in random order."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    blocks = torch.randperm(sum(counts), generator=generator) + 1
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    for row, part in enumerate(blocks.split(counts)):
        tables[row, : counts[row]] = part
    positions = [
        (row, position)
        for row, (query, length) in enumerate(zip(queries, lengths, strict=True))
        for position in range(length - query, length)
    ]
    slots = [
        int(tables[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE
        for row, position in positions
    ]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *queries]).cumsum(0).int().cuda(),
        seq_lens=torch.tensor(lengths).int().cuda(),
        block_tables=tables.int().cuda(),
        slot_mapping=torch.tensor(slots).cuda(),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )

    def randn(heads: int) -> Tensor:
        return torch.randn(sum(queries), heads, layer.head_dim, dtype=torch.bfloat16, device="cuda")

    pairs = sum(position + 1 for _, position in positions)
    return Step(
        layer,
        metadata,
        randn(layer.num_heads),
        randn(layer.num_kv_heads),
        randn(layer.num_kv_heads),
        sum(counts) + 1,
        sum(lengths) * 2 * layer.num_kv_heads * layer.head_dim,
        4.0 * pairs * layer.num_heads * layer.head_dim,
    )


def gather_and_attend(step: Step, keys: Tensor, values: Tensor) -> Tensor:
    """SDPA over what the block tables name; the sequences of a step here are all of one length."""
    length, batch = step.metadata.max_seq_len, len(step.metadata.seq_lens)
    k, v = (
        cache[step.metadata.block_tables.long()].flatten(1, 2)[:, :length].transpose(1, 2)
        for cache in (keys, values)
    )
    q = step.q.unflatten(0, (batch, -1)).transpose(1, 2)
    mask = None
    if q.shape[2] > 1:
        mask = torch.ones(q.shape[2], length, dtype=torch.bool, device="cuda").tril(length - q.shape[2])
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def installed(step: Step, keys: Tensor, values: Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Other libraries' paged attention, where it can be imported and takes these shapes."""
    for name, make in (
        ("torch varlen_attn", torch_varlen),
        ("flash-attn", flash_attn),
        ("FlashInfer", flash_infer),
    ):
        try:
            function = make(step, keys, values)
            function()
        except Exception as error:  # whatever a library raises for what it lacks
            print(f"{name}: not measured, {type(error).__name__}: {str(error).splitlines()[:1]}")
            continue
        yield name, function


def torch_varlen(step: Step, keys: Tensor, values: Tensor) -> Callable[[], Any]:
    from torch.nn.attention.varlen import varlen_attn

    data = step.metadata
    starts = torch.nn.functional.pad(data.seq_lens.cumsum(0), (1, 0)).int()
    return lambda: varlen_attn(
        step.q,
        keys,
        values,
        data.query_start_loc,
        starts,
        data.max_query_len,
        data.max_seq_len,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=data.seq_lens,
        block_table=data.block_tables,
        num_splits=1,
    )


def flash_attn(step: Step, keys: Tensor, values: Tensor) -> Callable[[], Any]:
    from flash_attn import flash_attn_with_kvcache

    data = step.metadata
    q = step.q.unflatten(0, (len(data.seq_lens), -1))
    return lambda: flash_attn_with_kvcache(
        q, keys, values, cache_seqlens=data.seq_lens, block_table=data.block_tables, causal=True
    )


def flash_infer(step: Step, keys: Tensor, values: Tensor) -> Callable[[], Any]:
    import flashinfer

    data, layer = step.metadata, step.layer
    counts = -(-data.seq_lens // BLOCK_SIZE)
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    indices = torch.cat([row[:count] for row, count in zip(data.block_tables, counts, strict=True)])
    last = (data.seq_lens - 1) % BLOCK_SIZE + 1
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), "NHD"
    )
    wrapper.plan(
        data.query_start_loc,
        indptr,
        indices,
        last.int(),
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        BLOCK_SIZE,
        causal=True,
        q_data_type=torch.bfloat16,
    )
    return lambda: wrapper.run(step.q, (keys, values))
