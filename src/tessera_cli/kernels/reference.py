"""Paged attention in plain torch: the oracle for every kernel, fast enough for small models on a CPU."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera_cli.kernels.backend import NULL_BLOCK, SKIPPED_SLOT, AttentionMetadata


@dataclass(frozen=True, eq=False)
class _DecodeGroup:
    """Sequences of similar length that ask for one token each."""

    tokens: Tensor  # int64 [n], their packed tokens
    slots: Tensor  # int64 [n, length], the cache slot of every position; past a sequence's end slot 0
    mask: Tensor  # bool [n, 1, 1, length], True where the sequence has a position


@dataclass(frozen=True, eq=False)
class _PrefillChunk:
    """A run of consecutive tokens of one sequence, after whatever the cache has of it."""

    start: int
    end: int
    slots: Tensor  # int64 [length], the cache slot of every position up to the chunk's last
    mask: Tensor | None  # bool [end - start, length]; None where the chunk is the whole sequence


@dataclass(frozen=True, eq=False)
class _StepPlan:
    """All that the layers of one step share."""

    written: Tensor | None  # int64, the packed tokens that are stored; None for all of them
    slots: Tensor  # int64, where they are stored
    decodes: tuple[_DecodeGroup, ...]
    prefills: tuple[_PrefillChunk, ...]


class ReferenceAttention:
    """Holds the KV cache, NHD blocks [num_blocks, block_size, num_kv_heads, head_dim] per layer, and attends.

    The null block 0 is never written and stays zero. Positions past a sequence's end are read from it, so
    what other or former sequences left in their slots, NaN included, cannot reach a result.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        # Empty, not zero: on a CPU a block costs memory once it is written, not when the engine starts.
        self.key_cache = torch.empty(shape, dtype=dtype, device=device)
        self.value_cache = torch.empty(shape, dtype=dtype, device=device)
        self.key_cache[:, NULL_BLOCK] = 0
        self.value_cache[:, NULL_BLOCK] = 0
        self._block_size = block_size
        self._planned: tuple[AttentionMetadata, _StepPlan] | None = None

    def attend(self, metadata: AttentionMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values, then attend causally over each sequence's blocks.

        Args:
            metadata: the step's; the same object for every layer.
            layer: index of the layer, from 0.
            q: [num_tokens, num_heads, head_dim], rotated; `num_heads` is a multiple of `num_kv_heads`.
            k: [num_tokens, num_kv_heads, head_dim], rotated.
            v: [num_tokens, num_kv_heads, head_dim].

        Returns:
            softmax(q kᵀ / sqrt(head_dim)) v, shaped and typed like `q`.
        """
        plan = self._plan(metadata)
        keys = self.key_cache[layer].flatten(0, 1)  # [num_slots, num_kv_heads, head_dim], a view
        values = self.value_cache[layer].flatten(0, 1)
        keys.index_copy_(0, plan.slots, k if plan.written is None else k[plan.written])
        values.index_copy_(0, plan.slots, v if plan.written is None else v[plan.written])

        out = torch.empty_like(q)
        for group in plan.decodes:
            out[group.tokens] = _attend_decodes(group, q[group.tokens], keys, values)
        for chunk in plan.prefills:
            out[chunk.start : chunk.end] = _attend_chunk(chunk, q[chunk.start : chunk.end], keys, values)
        return out

    def _plan(self, metadata: AttentionMetadata) -> _StepPlan:
        if self._planned is None or self._planned[0] is not metadata:
            self._planned = (metadata, _plan_step(metadata, self._block_size))
        return self._planned[1]


def _plan_step(metadata: AttentionMetadata, block_size: int) -> _StepPlan:
    starts = metadata.query_start_loc.tolist()
    lengths = metadata.seq_lens.tolist()
    positions = torch.arange(metadata.max_seq_len, device=metadata.block_tables.device)
    sequence_slots = (
        metadata.block_tables.long()[:, positions // block_size] * block_size + positions % block_size
    )

    decodes, prefills = [], []
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if end - start == 1:
            decodes.append(row)
            continue
        num_cached = length - (end - start)
        causal = positions[:length] <= positions[num_cached:length, None]
        mask = causal if num_cached else None
        prefills.append(_PrefillChunk(start, end, sequence_slots[row, :length], mask))

    groups = []
    for rows in _rows_of_similar_length(decodes, lengths):
        index = torch.tensor(rows, device=positions.device)
        longest = lengths[rows[0]]
        mask = positions[:longest] < metadata.seq_lens[index, None]
        # A slot of the null block for each position that the sequence does not have.
        slots = torch.where(mask, sequence_slots[index, :longest], NULL_BLOCK * block_size)
        tokens = metadata.query_start_loc[index].long()
        groups.append(_DecodeGroup(tokens, slots, mask[:, None, None, :]))

    stored = metadata.slot_mapping != SKIPPED_SLOT
    written = None if bool(stored.all()) else stored.nonzero().flatten()
    slots = metadata.slot_mapping if written is None else metadata.slot_mapping[written]
    return _StepPlan(written, slots, tuple(groups), tuple(prefills))


def _rows_of_similar_length(rows: list[int], lengths: list[int]) -> list[list[int]]:
    """Split `rows` so that no sequence is padded to more than twice its length; longest first."""
    groups: list[list[int]] = []
    for row in sorted(rows, key=lambda row: lengths[row], reverse=True):
        if groups and lengths[groups[-1][0]] <= 2 * lengths[row]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _attend_decodes(group: _DecodeGroup, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [n, num_heads, head_dim] -> like q. The heads that share a key head stand in as its queries."""
    num_kv_heads, head_dim = keys.shape[1:]
    k = _gather(keys, group.slots).transpose(1, 2)
    v = _gather(values, group.slots).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        q.view(len(q), num_kv_heads, -1, head_dim), k, v, attn_mask=group.mask
    )
    return out.reshape(q.shape)


def _attend_chunk(chunk: _PrefillChunk, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [num_queries, num_heads, head_dim] -> like q."""
    k = _gather(keys, chunk.slots).transpose(0, 1)[None]
    v = _gather(values, chunk.slots).transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """cache [num_slots, num_kv_heads, head_dim], slots [...] -> [..., num_kv_heads, head_dim]."""
    # An embedding is the fastest way to gather rows on a CPU: a quarter faster than index_select.
    rows = F.embedding(slots, cache.flatten(1))
    return rows.unflatten(-1, cache.shape[1:])
