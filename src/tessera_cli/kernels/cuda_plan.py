"""Which CUDA kernels a layer uses, and how a step is laid out on the device: numbers, no tensors."""

import math
from dataclasses import dataclass

import torch

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.kernels.backend import MAX_COMPILED_HEAD_DIM

_ELEMENTS = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
}
_TENSOR_CORE_DTYPES = (torch.float16, torch.bfloat16)
_CONVERTED_DTYPES = (torch.int8, torch.float8_e4m3fn)  # of caches, by the tensor-core kernel

SPLIT_MULTIPLE = 64  # tokens; no tile of keys crosses the end of a split
_MIN_SPLIT_LEN = 256  # below it, merging costs more than a longer split
_MAX_SPLIT_LEN = 4096  # of decodes, so that one long sequence does not outlast many short ones
_FIXED_SPLIT_LEN = 1024
_BLOCKS_PER_MULTIPROCESSOR = 2  # resident at least, by the kernels' registers and shared memory


@dataclass(frozen=True)
class AttentionKernel:
    """An instance of an attention kernel.

    Attributes:
        name: its C++ name.
        rows: query rows of a tile.
        threads: of a thread block.
        shared_bytes: of dynamic shared memory.
    """

    name: str
    rows: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class LayerKernels:
    """The kernels of one layer; `decode` takes steps whose queries fit one tile, `prefill` all others."""

    decode: AttentionKernel
    prefill: AttentionKernel
    merge: str
    write: str

    @property
    def names(self) -> tuple[str, ...]:
        """Their C++ names."""
        return self.decode.name, self.prefill.name, self.merge, self.write


def layer_kernels(layer: AttentionLayer, dtype: torch.dtype, kv_cache_dtype: torch.dtype) -> LayerKernels:
    """The kernels for one layer with queries of `dtype`.

    Raises:
        UsageError: there are none for this head size or these dtypes.
    """
    head_dim = layer.head_dim
    hint = "use the reference attention backend"
    if head_dim % 8 or head_dim > MAX_COMPILED_HEAD_DIM:
        raise UsageError(f"the CUDA kernels have no heads of {head_dim} elements", hint=hint)
    if dtype not in _ELEMENTS or dtype in _CONVERTED_DTYPES or kv_cache_dtype not in _ELEMENTS:
        raise UsageError(f"the CUDA kernels have no {dtype} over a cache of {kv_cache_dtype}", hint=hint)
    query, cache = _ELEMENTS[dtype], _ELEMENTS[kv_cache_dtype]
    converts = kv_cache_dtype in _CONVERTED_DTYPES
    if dtype in _TENSOR_CORE_DTYPES and (converts or kv_cache_dtype == dtype) and head_dim % 16 == 0:
        warps = 2 if head_dim > 128 else 4
        decode, prefill = (_tensor_core(query, cache, head_dim, warps, rows) for rows in (1, warps))
    else:
        decode = prefill = _plain(query, cache, head_dim)
    return LayerKernels(
        decode, prefill, f"merge_splits<{query}, {head_dim}>", f"write_kv<{query}, {cache}, {head_dim}>"
    )


def _tensor_core(query: str, cache: str, head_dim: int, warps: int, row_warps: int) -> AttentionKernel:
    """Sizes as in `Shape` and `SharedTiles` of paged_attention.cu."""
    rows, keys, pitch = 16 * row_warps, 16 * warps, head_dim + 8
    tile = 2 * keys * pitch * 2
    shared = rows * pitch * 2 + 2 * tile
    if cache != query:  # one tile of operands, two as they are in the cache, and their scales
        shared += -tile + 2 * (2 * keys * head_dim + (2 * keys * 4 if cache == "int8" else 0))
    name = f"attend_tensor_core<{query}, {cache}, {head_dim}, {row_warps}>"
    return AttentionKernel(name, rows, 32 * warps, shared)


def _plain(query: str, cache: str, head_dim: int) -> AttentionKernel:
    """Sizes as in attend_plain.cuh."""
    rows, keys = 4, 32
    shared = 4 * (rows * head_dim + keys * (head_dim + 1) + keys * head_dim)
    return AttentionKernel(f"attend_plain<{query}, {cache}, {head_dim}>", rows, 32 * rows, shared)


@dataclass(frozen=True)
class StepPlan:
    """How one layer of a step is laid out.

    Attributes:
        kernel: that attends.
        num_tiles: thread blocks of each KV head and split; an upper bound, only the device knows better.
        num_splits: of the keys; with more than one, partial results are merged.
        split_len: tokens, a multiple of `SPLIT_MULTIPLE`.
    """

    kernel: AttentionKernel
    num_tiles: int
    num_splits: int
    split_len: int


def plan_step(
    layer: AttentionLayer,
    kernels: LayerKernels,
    *,
    num_tokens: int,
    num_seqs: int,
    max_query_len: int,
    max_seq_len: int,
    num_multiprocessors: int,
    deterministic: bool,
) -> StepPlan:
    """Lay out a step from what the host knows of it, which for a captured graph are upper bounds.

    Keys are split where the query tiles alone would leave multiprocessors idle. Where `deterministic`, kernel
    and splits depend on the layer alone, so a token's bits depend neither on its neighbours nor on the chunk
    that it comes in.
    """
    group = layer.num_heads // layer.num_kv_heads
    decodes = max_query_len * group <= kernels.decode.rows
    kernel = kernels.decode if decodes or deterministic else kernels.prefill
    span = max_seq_len
    if layer.sliding_window is not None:
        span = min(span, layer.sliding_window + min(max_query_len, kernel.rows))
    if deterministic:
        split_len = _FIXED_SPLIT_LEN
    else:
        blocks = layer.num_kv_heads * max(num_seqs, math.ceil(num_tokens * group / kernel.rows))
        wanted = math.ceil(_BLOCKS_PER_MULTIPROCESSOR * num_multiprocessors / blocks)
        count = max(1, min(wanted, math.ceil(span / _MIN_SPLIT_LEN)))
        split_len = math.ceil(span / count / SPLIT_MULTIPLE) * SPLIT_MULTIPLE
        if decodes:
            split_len = min(split_len, _MAX_SPLIT_LEN)
    num_splits = math.ceil(span / split_len)
    # Splits lie at multiples of their length, so a window that starts between two needs one more.
    if span < max_seq_len:
        num_splits += 1
    return StepPlan(kernel, num_tokens * group // kernel.rows + num_seqs, num_splits, split_len)
