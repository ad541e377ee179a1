"""How keys and values are stored: dtypes, bytes, and one layer's paged tensor in plain torch."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.kernels.backend import NULL_BLOCK

KV_CACHE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
_SCALE_BYTES = 4  # a float32 for each token and head of an int8 cache
_INT8_MAX = 127
_FP8_LIMIT = 464.0  # halfway from 448, the largest number, to what would be the next; a tie goes to 448


def select_kv_cache_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype that keys and values are stored in: `name`, or for "auto" the model's `dtype`.

    Raises:
        UsageError: `name` is not such a dtype.
    """
    if name == "auto":
        return dtype
    if name not in KV_CACHE_DTYPES:
        raise UsageError(
            f"{name!r} is not a dtype of the KV cache", hint="use auto, " + ", ".join(KV_CACHE_DTYPES)
        )
    return KV_CACHE_DTYPES[name]


def kv_block_bytes(layers: Iterable[AttentionLayer], *, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block of `block_size` tokens: keys, values and scales of all `layers`."""
    head_bytes = _SCALE_BYTES if dtype == torch.int8 else 0
    return sum(
        2 * block_size * layer.num_kv_heads * (layer.head_dim * dtype.itemsize + head_bytes)
        for layer in layers
    )


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 with one scale per row: `x` [..., head_dim] -> int8 like `x`, float32 scales [...].

    A scale is the row's largest magnitude over 127, so an element is off by at most half a scale. A row that
    is not finite gets a scale that is not: it is read back as NaN, never as a number.
    """
    x = x.float()
    scales = x.abs().amax(-1) / _INT8_MAX
    steps = (x / scales[..., None]).round().nan_to_num(0.0)  # 0 / 0 of a row of zeros, and rows of NaN
    return steps.to(torch.int8), torch.where(scales.isfinite(), scales, torch.nan)


def to_fp8(x: Tensor) -> Tensor:
    """`x` in float8 e4m3, to the nearest, ties to even; NaN beyond 464, above which 448 is not the nearest.

    torch itself makes 448 of all that is larger, infinities included, or NaN, depending on its version.
    """
    x = x.float()
    return x.where(x.abs() <= _FP8_LIMIT, torch.nan).to(torch.float8_e4m3fn)


class PagedTensor:
    """The keys or the values of one layer, NHD blocks [num_blocks, block_size, num_kv_heads, head_dim].

    Attributes:
        elements: the blocks, in the dtype of the cache.
        scales: float32 [num_blocks, block_size, num_kv_heads] of an int8 cache, else None.
    """

    def __init__(
        self,
        layer: AttentionLayer,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_blocks, block_size, layer.num_kv_heads, layer.head_dim)
        # Empty, not zero: on a CPU a block costs memory once it is written, not when the engine starts.
        self.elements = torch.empty(shape, dtype=dtype, device=device)
        self.scales = (
            torch.empty(shape[:-1], dtype=torch.float32, device=device) if dtype == torch.int8 else None
        )
        for tensor in self._tensors():
            tensor[NULL_BLOCK].zero_()

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Store `rows` [n, num_kv_heads, head_dim] in `slots` int64 [n], converted to the cache's dtype."""
        elements = self.elements.flatten(0, 1)
        if self.scales is None:
            fp8 = elements.dtype == torch.float8_e4m3fn
            stored = to_fp8(rows) if fp8 else rows.to(elements.dtype)
            _movable(elements).index_copy_(0, slots, _movable(stored))
            return
        steps, scales = quantise(rows)
        elements.index_copy_(0, slots, steps)
        self.scales.flatten(0, 1).index_copy_(0, slots, scales)

    def read(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """What `slots` int64 [...] hold: `dtype` [..., num_kv_heads, head_dim]."""
        rows = _gather(self.elements.flatten(0, 1), slots)
        if self.scales is None:
            return rows.to(dtype)
        scales = _gather(self.scales.flatten(0, 1), slots)
        return (rows * scales[..., None]).to(dtype)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks `sources` int64 [n] to `targets`; all are read before one is written."""
        for tensor in map(_movable, self._tensors()):
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    def _tensors(self) -> list[Tensor]:
        return [self.elements] if self.scales is None else [self.elements, self.scales]


def _movable(tensor: Tensor) -> Tensor:
    """`tensor`, or its bytes where torch has no index_copy_ for its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """cache [num_slots, ...], slots [...] -> [*slots.shape, *cache.shape[1:]]."""
    # An embedding is the fastest way to gather rows on a CPU: a quarter faster than index_select.
    return F.embedding(slots, cache.flatten(1)).unflatten(-1, cache.shape[1:])
