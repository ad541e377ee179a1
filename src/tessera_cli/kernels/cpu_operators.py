"""Elementwise steps of a decoder layer, compiled, each beside its definition in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera_cli.kernels.cpu_library import KINDS, CpuLibrary

_WIDTH_MULTIPLE = 8


def plain_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x`, in place; returns its RMS norm (arXiv 1910.07467) times `weight` [width]."""
    residual += x
    return F.rms_norm(residual, weight.shape, weight, eps)


def plain_rotate(packed: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first `heads` heads of `packed` [num_tokens, all heads, head_dim] in place.

    `cos` and `sin` are float32 [num_tokens, 1, head_dim], the sine with the sign of the first half
    (arXiv 2104.09864, halves against each other).
    """
    x = packed[:, :heads]
    x.copy_((x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype))


def plain_silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `gate_up` [num_tokens, 2 * width], the gate first: [num_tokens, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class CpuOperators:
    """The same by the compiled library, on one or more threads; float32, float16 or bfloat16.

    All arithmetic is float32, rounded once for each tensor that is written.
    """

    def __init__(self, library: CpuLibrary) -> None:
        self._functions = library.functions

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`plain_add_rms_norm`.

        Args:
            x: [num_tokens, width], contiguous; width is a multiple of 8.
            residual: like `x`; written.
            weight: [width].
            eps: added to the mean square.

        Raises:
            ValueError: shapes, dtypes or strides do not fit.
        """
        num_tokens, width = x.shape
        _check(residual.shape == x.shape and weight.shape == (width,), x, residual, weight)
        _check(width % _WIDTH_MULTIPLE == 0 and _contiguous(x, residual, weight), x, residual, weight)
        out = torch.empty_like(x)
        self._functions.tessera_add_rms_norm(
            residual.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            num_tokens,
            width,
            eps,
            KINDS[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def rotate(self, packed: Tensor, heads: int, cos: Tensor, sin: Tensor) -> None:
        """`plain_rotate`.

        Args:
            packed: [num_tokens, all heads, head_dim], a token's heads contiguous; head_dim a multiple of 8.
            heads: how many of them are rotated.
            cos: float32 [num_tokens, 1, head_dim], contiguous.
            sin: like `cos`.

        Raises:
            ValueError: shapes, dtypes or strides do not fit.
        """
        num_tokens, all_heads, head_dim = packed.shape
        _check(packed.stride()[1:] == (head_dim, 1) and heads <= all_heads, packed)
        _check(head_dim % _WIDTH_MULTIPLE == 0, packed)
        tables_fit = cos.shape == sin.shape == (num_tokens, 1, head_dim) and _contiguous(cos, sin)
        if not tables_fit or cos.dtype != torch.float32 or sin.dtype != torch.float32:
            raise ValueError("cos and sin must be contiguous float32 [num_tokens, 1, head_dim]")
        self._functions.tessera_rotate(
            packed.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_tokens,
            packed.stride(0),
            heads,
            head_dim,
            KINDS[packed.dtype],
            torch.get_num_threads(),
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`plain_silu_and_mul`; `gate_up` is contiguous and width a multiple of 8.

        Raises:
            ValueError: the shape or dtype does not fit.
        """
        num_tokens, both = gate_up.shape
        width = both // 2
        _check(both % (2 * _WIDTH_MULTIPLE) == 0 and gate_up.is_contiguous(), gate_up)
        out = torch.empty(num_tokens, width, dtype=gate_up.dtype)
        self._functions.tessera_silu_and_mul(
            gate_up.data_ptr(),
            out.data_ptr(),
            num_tokens,
            width,
            KINDS[gate_up.dtype],
            torch.get_num_threads(),
        )
        return out


def _contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _check(fits: bool, *tensors: Tensor) -> None:
    """Refuse tensors that do not fit, differ in dtype, or have one that the library lacks.

    Raises:
        ValueError: so they are.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if not fits or len(dtypes) > 1 or not dtypes <= set(KINDS) - {torch.int8}:
        described = ", ".join(f"{t.dtype} {tuple(t.shape)} strides {t.stride()}" for t in tensors)
        raise ValueError(f"no compiled operator for {described}")
