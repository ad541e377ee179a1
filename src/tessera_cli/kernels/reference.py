"""Paged attention in plain torch: the oracle for every kernel, fast enough for small models on a CPU."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.kernels.backend import NULL_BLOCK, SKIPPED_SLOT, AttentionMetadata
from tessera_cli.kernels.dense import dense_attention, visible
from tessera_cli.kernels.kv_cache import PagedTensor


@dataclass(frozen=True, eq=False)
class _DecodeGroup:
    """Sequences with similarly many visible positions that ask for one token each."""

    tokens: Tensor  # int64 [n], their packed tokens
    slots: Tensor  # int64 [n, width], the cache slots of the positions that they see
    mask: Tensor  # bool [n, 1, 1, width], False where a row is padded


@dataclass(frozen=True, eq=False)
class _PrefillChunk:
    """A run of consecutive tokens of one sequence, after whatever the cache has of it."""

    start: int
    end: int
    slots: Tensor  # int64 [width], the cache slots of the positions that any of its tokens sees
    mask: Tensor | None  # bool [end - start, width]; None where it is causal over the chunk itself


@dataclass(frozen=True, eq=False)
class _StepPlan:
    """What the layers of one step with the same window share."""

    written: Tensor | None  # int64, the packed tokens that are stored; None for all of them
    slots: Tensor  # int64, where they are stored
    decodes: tuple[_DecodeGroup, ...]
    prefills: tuple[_PrefillChunk, ...]


class ReferenceAttention:
    """Holds the KV cache, a key and a value tensor per layer, and attends.

    The null block 0 is never written and stays zero. Only slots that a sequence sees are read for it, so
    what other or former sequences left behind, NaN included, cannot reach its result.

    Args:
        layers: what attention is in each layer; layers may differ in everything.
        num_blocks: blocks of each layer, the null block included.
        block_size: tokens of a block.
        dtype: of queries and results.
        kv_cache_dtype: that keys and values are stored in, float32, float16, bfloat16, int8 or
            float8_e4m3fn.
        device: of all tensors.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        def paged(layer: AttentionLayer) -> PagedTensor:
            return PagedTensor(
                layer, num_blocks=num_blocks, block_size=block_size, dtype=kv_cache_dtype, device=device
            )

        self.layers = tuple(layers)
        self.key_caches = [paged(layer) for layer in layers]
        self.value_caches = [paged(layer) for layer in layers]
        self._block_size = block_size
        self._dtype = dtype
        self._planned: AttentionMetadata | None = None
        self._plans: dict[int | None, _StepPlan] = {}  # by window, of the planned step

    def attend(self, metadata: AttentionMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values, then attend causally over each sequence's blocks.

        Args:
            metadata: the step's; the same object for every layer.
            layer: index of the layer, from 0.
            q: [num_tokens, num_heads, head_dim], rotated.
            k: [num_tokens, num_kv_heads, head_dim], rotated.
            v: [num_tokens, num_kv_heads, head_dim].

        Returns:
            Attention as `dense_attention` defines it, shaped and typed like `q`.
        """
        plan = self._plan(metadata, self.layers[layer])
        keys, values = self.key_caches[layer], self.value_caches[layer]
        keys.write(plan.slots, k if plan.written is None else k[plan.written])
        values.write(plan.slots, v if plan.written is None else v[plan.written])

        out = torch.empty_like(q)
        for group in plan.decodes:
            k, v = (cache.read(group.slots, self._dtype).transpose(1, 2) for cache in (keys, values))
            # The heads that share a key head stand in as its queries.
            queries = q[group.tokens].unflatten(1, (k.shape[1], -1))
            attended = dense_attention(self.layers[layer], queries, k, v, group.mask)
            out[group.tokens] = attended.flatten(1, 2)
        for chunk in plan.prefills:
            k, v = (cache.read(chunk.slots, self._dtype).transpose(0, 1)[None] for cache in (keys, values))
            queries = q[chunk.start : chunk.end].transpose(0, 1)[None]
            attended = dense_attention(self.layers[layer], queries, k, v, chunk.mask)
            out[chunk.start : chunk.end] = attended[0].transpose(0, 1)
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block to block, (source, target), in all layers; all sources are read before a write.

        Raises:
            ValueError: a target is the null block.
        """
        if not pairs:
            return
        if any(target == NULL_BLOCK for _, target in pairs):
            raise ValueError("the null block is never written")
        for cache in (*self.key_caches, *self.value_caches):
            sources, targets = torch.tensor(pairs, device=cache.elements.device).T
            cache.copy_blocks(sources, targets)

    def _plan(self, metadata: AttentionMetadata, layer: AttentionLayer) -> _StepPlan:
        if self._planned is not metadata:
            self._planned, self._plans = metadata, {}
        window = layer.sliding_window
        if window not in self._plans:
            self._plans[window] = _plan_step(metadata, layer, self._block_size)
        return self._plans[window]


def _plan_step(metadata: AttentionMetadata, layer: AttentionLayer, block_size: int) -> _StepPlan:
    device = metadata.block_tables.device
    tables = metadata.block_tables.long()
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    # The first position that a sequence's first query sees; blocks before it are not touched.
    reach = metadata.max_seq_len if layer.sliding_window is None else layer.sliding_window
    decodes: list[int] = []
    prefills: list[_PrefillChunk] = []
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if end - start == 1:
            decodes.append(row)
        elif end > start:
            num_cached = length - (end - start)
            keys = torch.arange(max(num_cached - reach + 1, 0), length, device=device)
            slots = tables[row, keys // block_size] * block_size + keys % block_size
            queries = torch.arange(num_cached, length, device=device)
            plain = num_cached == 0 and reach >= length
            prefills.append(
                _PrefillChunk(start, end, slots, None if plain else visible(layer, queries, keys))
            )

    seen = [min(length, reach) for length in lengths]
    groups: list[_DecodeGroup] = []
    for rows in _rows_of_similar_length(decodes, seen):
        index = torch.tensor(rows, device=device)
        last = metadata.seq_lens[index, None] - 1
        ages = torch.arange(seen[rows[0]], device=device)
        mask = ages < torch.tensor([seen[row] for row in rows], device=device)[:, None]
        # A padded place reads the sequence's own last position: nothing foreign, whatever the mask.
        keys = torch.where(mask, last - ages, last)
        slots = tables[index[:, None], keys // block_size] * block_size + keys % block_size
        groups.append(_DecodeGroup(metadata.query_start_loc[index].long(), slots, mask[:, None, None, :]))

    stored = metadata.slot_mapping != SKIPPED_SLOT
    written = None if bool(stored.all()) else stored.nonzero().flatten()
    stored_slots = metadata.slot_mapping if written is None else metadata.slot_mapping[written]
    return _StepPlan(written, stored_slots, tuple(groups), tuple(prefills))


def _rows_of_similar_length(rows: list[int], lengths: list[int]) -> list[list[int]]:
    """Split `rows` so that no sequence is padded to more than twice its length; longest first."""
    groups: list[list[int]] = []
    for row in sorted(rows, key=lambda row: lengths[row], reverse=True):
        if groups and lengths[groups[-1][0]] <= 2 * lengths[row]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
