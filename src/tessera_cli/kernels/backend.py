"""What every paged-attention backend is given, and which backend runs where."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.int8_weight import Int8Weight

if TYPE_CHECKING:
    from tessera_cli.kernels.cpu_operators import CpuOperators
    from tessera_cli.kernels.float32_linear import Float32Linear
    from tessera_cli.kernels.int8_linear import Int8Linear

NULL_BLOCK = 0
SKIPPED_SLOT = -1
# Sizes of blocks, in tokens, and of heads, in elements and multiples of 8, that compiled kernels exist for.
COMPILED_BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_COMPILED_HEAD_DIM = 256


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where the tokens of one step belong; one object serves all the layers of that step.

    Attributes:
        query_start_loc: int32 [num_seqs + 1], the first packed token of each sequence, and their number.
        seq_lens: int32 [num_seqs], tokens in the cache after this step.
        block_tables: int32 [num_seqs, max_blocks], padded with the null block 0.
        slot_mapping: int64 [num_tokens], block * block_size + offset; -1 is skipped.
        max_query_len: the longest query of the step, in tokens.
        max_seq_len: the longest sequence of the step, in tokens.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int


class AttentionBackend(Protocol):
    """Holds the KV cache of all layers, in a layout of its own, and attends over it."""

    def attend(self, metadata: AttentionMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values, then attend; `ReferenceAttention.attend` is the definition."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block to block, (source, target), in all layers; all sources are read before a write."""
        ...


def select_backend(
    name: str,
    device: str,
    *,
    layers: Sequence[AttentionLayer] = (),
    block_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[str, str]:
    """The attention backend for `name` ("auto" or a backend's name) on `device`, and the reason for it.

    Without `layers`, `block_size` and `dtype` the answer is about the machine alone; a model may have sizes
    or numbers that the compiled kernel lacks.

    Raises:
        UsageError: no backend has this name, or it does not run here or with such a model.
    """
    if name not in ("auto", *_BACKENDS):
        raise UsageError(f"{name!r} is not an attention backend", hint="use auto, " + ", ".join(_BACKENDS))
    if name == "reference":
        return name, "asked for"
    kernel = device.partition(":")[0]
    if name not in ("auto", kernel):
        raise UsageError(
            f"the attention backend {name!r} does not run on {device}",
            hint=f"use auto, {kernel} or reference",
        )
    obstacle = _OBSTACLES[kernel](device) or _sizes_obstacle(layers, block_size)
    if obstacle is None and dtype is torch.float64:
        obstacle = "the compiled kernels have no float64"
    if obstacle is None:
        return kernel, f"the compiled kernel for {kernel}" if name == "auto" else "asked for"
    if name == "auto":
        return "reference", f"plain PyTorch: {obstacle}"
    raise UsageError(f"the attention backend {name!r} cannot run: {obstacle}", hint="use auto or reference")


def build_attention(
    name: str,
    layers: Sequence[AttentionLayer],
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: torch.dtype,
    device: torch.device | str,
) -> AttentionBackend:
    """The backend that `select_backend` named, with an empty KV cache; the arguments are every backend's.

    Raises:
        RuntimeError: the device has no memory for the KV cache.
    """
    return _BACKENDS[name]()(
        layers,
        num_blocks=num_blocks,
        block_size=block_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        device=device,
    )


def build_operators(name: str, widths: Sequence[int]) -> "CpuOperators | None":
    """The compiled steps between a decoder's products that go with a backend, for vectors of `widths`.

    None where there are none: plain torch then.
    """
    if name != "cpu":
        return None
    from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
    from tessera_cli.kernels.cpu_operators import WIDTH_MULTIPLE, CpuOperators

    library = load_library()
    fits = all(width % WIDTH_MULTIPLE == 0 for width in widths)
    return CpuOperators(library) if fits and isinstance(library, CpuLibrary) else None


def build_product(name: str, weight: "Tensor | Int8Weight") -> "Float32Linear | Int8Linear | None":
    """The compiled product with `weight` [outputs, inputs] that goes with a backend; it may overwrite that.

    None where there is none, as for weights of 16 bits: plain torch then.
    """
    if name != "cpu":
        return None
    from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
    from tessera_cli.kernels.float32_linear import Float32Linear
    from tessera_cli.kernels.int8_linear import Int8Linear

    library = load_library()
    if not isinstance(library, CpuLibrary):
        return None
    if isinstance(weight, Int8Weight):
        return Int8Linear(library, weight, in_place=True)
    return Float32Linear(library, weight, in_place=True) if weight.dtype == torch.float32 else None


def _sizes_obstacle(layers: Sequence[AttentionLayer], block_size: int | None) -> str | None:
    """Why the compiled kernels do not run with these sizes; None if they do."""
    if block_size is not None and block_size not in COMPILED_BLOCK_SIZES:
        return f"the compiled kernels have blocks of {_listed(COMPILED_BLOCK_SIZES)} tokens, not {block_size}"
    lacking = [
        layer.head_dim for layer in layers if layer.head_dim % 8 or layer.head_dim > MAX_COMPILED_HEAD_DIM
    ]
    if lacking:
        return f"the compiled kernels have no heads of {lacking[0]} elements"
    return None


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _reference() -> Callable[..., AttentionBackend]:
    from tessera_cli.kernels.reference import ReferenceAttention

    return ReferenceAttention


def _cpu() -> Callable[..., AttentionBackend]:
    from tessera_cli.kernels.cpu import CpuAttention

    return CpuAttention


def _cuda() -> Callable[..., AttentionBackend]:
    from tessera_cli.kernels.cuda import CudaAttention

    return CudaAttention


def _cpu_obstacle(device: str) -> str | None:
    from tessera_cli.kernels.cpu_library import load_library

    library = load_library()
    return library if isinstance(library, str) else None


def _cuda_obstacle(device: str) -> str | None:
    from tessera_cli.kernels.cuda import find_obstacle

    return find_obstacle(device)


_BACKENDS = {"reference": _reference, "cpu": _cpu, "cuda": _cuda}
_OBSTACLES = {"cpu": _cpu_obstacle, "cuda": _cuda_obstacle}
