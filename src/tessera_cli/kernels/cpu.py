"""Paged attention on the CPU by the compiled library; `ReferenceAttention` is what it is tested against."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.kernels.backend import COMPILED_BLOCK_SIZES, NULL_BLOCK, AttentionMetadata
from tessera_cli.kernels.cpu_library import ACTIVATION_KINDS, KINDS, CpuLibrary, Layer, Step, load_library

HEAD_DIM_MULTIPLE = 8
_SMALL_PAGES_BYTES = 2 << 20


@dataclass(frozen=True, eq=False)
class _LayerCache:
    """One layer's blocks.

    Keys are transposed inside a block, [num_blocks, num_kv_heads, head_dim, block_size]; values are
    [num_blocks, num_kv_heads, block_size, head_dim]. An int8 cache has float32 scales beside both,
    [num_blocks, num_kv_heads, block_size].
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None

    def tensors(self) -> list[Tensor]:
        every = (self.keys, self.values, self.key_scales, self.value_scales)
        return [tensor for tensor in every if tensor is not None]


@dataclass(frozen=True, eq=False)
class _PlannedStep:
    """The tables of the step at hand. Holding the metadata keeps alive what `step` points to."""

    metadata: AttentionMetadata
    step: Step
    pointer: int


class CpuAttention:
    """Holds the KV cache and attends; interchangeable with `ReferenceAttention`, within rounding.

    A sequence's result depends on its own tokens alone, bit for bit: not on the other sequences of its
    batch, nor on the number of threads.

    Args:
        layers: the model's, in order; they may differ.
        num_blocks: blocks of the pool, the null block among them.
        block_size: tokens in a block: 8, 16, 32, 64 or 128.
        dtype: of queries and outputs: float32, float16 or bfloat16. Sums are float32 in any case.
        kv_cache_dtype: of stored keys and values: also int8, symmetric with a scale for each token and head,
            or float8_e4m3fn.
        device: the CPU.

    Attributes:
        described: the library's view of each layer's cache.

    Raises:
        UsageError: there is no compiled library, or it has no kernel for these sizes.
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
        library = load_library()
        if not isinstance(library, CpuLibrary):
            raise UsageError(f"no cpu attention: {library}", hint="or use the reference backend")
        _check_sizes(layers, block_size, dtype, kv_cache_dtype, device)
        self._functions = library.functions
        self._dtype = dtype
        self._kind = ACTIVATION_KINDS[dtype]
        self._layers = tuple(layers)
        self.caches = [_allocate(layer, num_blocks, block_size, kv_cache_dtype) for layer in layers]
        for cache in self.caches:
            for tensor in cache.tensors():
                # The first blocks are in small pages: a huge one for every tensor is 120 MB of 60 tensors.
                small = min(_SMALL_PAGES_BYTES, tensor.nbytes)
                self._functions.tessera_advise_huge_pages(tensor.data_ptr() + small, tensor.nbytes - small)
                tensor[NULL_BLOCK].zero_()
        described = [
            _describe(layer, cache, block_size) for layer, cache in zip(layers, self.caches, strict=True)
        ]
        self.described = (Layer * len(described))(*described)
        self._pointers = [ctypes.addressof(layer) for layer in self.described]
        self._planned: _PlannedStep | None = None

    def attend(self, metadata: AttentionMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values, then attend causally over each sequence's blocks.

        Tokens may be any distance apart in memory, as in views of a packed qkv.

        Args:
            metadata: the step's; the same object for every layer.
            layer: index of the layer, from 0.
            q: [num_tokens, num_heads, head_dim], rotated.
            k: [num_tokens, num_kv_heads, head_dim], rotated.
            v: like `k`.

        Returns:
            softmax(scale * q kᵀ, capped and masked) v, shaped and typed like `q`.

        Raises:
            ValueError: shapes or dtypes are not those of this layer and step.
        """
        step, num_tokens = self.planned(metadata)
        spec = self._layers[layer]
        q = self._checked(q, (num_tokens, spec.num_heads, spec.head_dim))
        k = self._checked(k, (num_tokens, spec.num_kv_heads, spec.head_dim))
        v = self._checked(v, (num_tokens, spec.num_kv_heads, spec.head_dim))
        out = q.new_empty((num_tokens, spec.num_heads, spec.head_dim))
        self._functions.tessera_attend(
            self._pointers[layer],
            step,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
            self._kind,
            torch.get_num_threads(),
        )
        return out

    def planned(self, metadata: AttentionMetadata) -> tuple[int, int]:
        """The address of the library's view of a step, which lives until the next one, and the step's tokens.

        Raises:
            ValueError: a table is not contiguous or has another dtype.
        """
        planned = self._planned
        if planned is None or planned.metadata is not metadata:
            planned = self._planned = _plan(metadata)
        return planned.pointer, planned.step.num_tokens

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block to block, (source, target), in all layers; all sources are read before a write.

        Raises:
            ValueError: a target is the null block.
        """
        if not pairs:
            return
        if any(target == NULL_BLOCK for _, target in pairs):
            raise ValueError("the null block is never written")
        sources, targets = torch.tensor(pairs, dtype=torch.int64).T.contiguous()
        self._functions.tessera_copy_blocks(
            self._pointers[0],
            len(self._pointers),
            sources.data_ptr(),
            targets.data_ptr(),
            len(pairs),
            torch.get_num_threads(),
        )

    def _checked(self, tensor: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """`tensor`, each token's heads contiguous.

        Raises:
            ValueError: it has another shape or dtype.
        """
        if tensor.shape != shape or tensor.dtype != self._dtype:
            raise ValueError(f"expected {self._dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}")
        if tensor.stride()[1:] != (shape[2], 1):
            return tensor.contiguous()
        return tensor


def _plan(metadata: AttentionMetadata) -> _PlannedStep:
    """Check the tables and note where they are.

    Raises:
        ValueError: a table is not contiguous or has another dtype.
    """
    int32 = (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables)
    if any(table.dtype != torch.int32 or not table.is_contiguous() for table in int32):
        raise ValueError("query_start_loc, seq_lens and block_tables must be contiguous int32")
    if metadata.slot_mapping.dtype != torch.int64 or not metadata.slot_mapping.is_contiguous():
        raise ValueError("slot_mapping must be contiguous int64")
    num_seqs, width = metadata.block_tables.shape
    step = Step(
        metadata.query_start_loc.data_ptr(),
        metadata.seq_lens.data_ptr(),
        metadata.block_tables.data_ptr(),
        metadata.slot_mapping.data_ptr(),
        num_seqs,
        width,
        len(metadata.slot_mapping),
    )
    return _PlannedStep(metadata, step, ctypes.addressof(step))


def _allocate(layer: AttentionLayer, num_blocks: int, block_size: int, dtype: torch.dtype) -> _LayerCache:
    # Empty, not zero: a block costs memory once it is written, not when the engine starts.
    heads = (num_blocks, layer.num_kv_heads)
    keys = torch.empty(*heads, layer.head_dim, block_size, dtype=dtype)
    values = torch.empty(*heads, block_size, layer.head_dim, dtype=dtype)
    if dtype != torch.int8:
        return _LayerCache(keys, values, None, None)
    return _LayerCache(keys, values, torch.empty(*heads, block_size), torch.empty(*heads, block_size))


def _describe(layer: AttentionLayer, cache: _LayerCache, block_size: int) -> Layer:
    return Layer(
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        None if cache.key_scales is None else cache.key_scales.data_ptr(),
        None if cache.value_scales is None else cache.value_scales.data_ptr(),
        KINDS[cache.keys.dtype],
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        block_size,
        layer.sliding_window or 0,
        layer.scale,
        layer.logits_soft_cap or 0.0,
    )


def _check_sizes(
    layers: Sequence[AttentionLayer],
    block_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Refuse what the library has no kernel for.

    Raises:
        UsageError: a size or dtype is none of those that the class names.
    """
    hint = "use the reference backend"
    if torch.device(device).type != "cpu":
        raise UsageError(f"the cpu attention backend does not run on {device}", hint=hint)
    if block_size not in COMPILED_BLOCK_SIZES:
        raise UsageError(f"block size {block_size}: the cpu backend has {COMPILED_BLOCK_SIZES}", hint=hint)
    if kv_cache_dtype not in KINDS or dtype not in ACTIVATION_KINDS:
        raise UsageError(f"the cpu backend has no {dtype} over a {kv_cache_dtype} cache", hint=hint)
    for index, layer in enumerate(layers):
        if layer.head_dim % HEAD_DIM_MULTIPLE or layer.num_heads % layer.num_kv_heads:
            raise UsageError(
                f"layer {index}: the cpu backend needs a head_dim that is a multiple of {HEAD_DIM_MULTIPLE} "
                f"and heads that share key heads evenly, got {layer}",
                hint=hint,
            )
