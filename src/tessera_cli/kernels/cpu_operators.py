"""The elementwise steps of a decoder layer, compiled; `models.operators.TorchOperators` defines them."""

from typing import Protocol

import torch
from torch import Tensor

from tessera_cli.kernels.cpu_library import ACTIVATION_KINDS, CpuLibrary

WIDTH_MULTIPLE = 8


class Norm(Protocol):
    """An RMS norm's parameters."""

    eps: float
    weight: torch.nn.Parameter


class CpuOperators:
    """`models.operators.Operators` by the compiled library, on one or more threads, without gradients.

    Tensors are float32, float16 or bfloat16; widths and head sizes are multiples of `WIDTH_MULTIPLE`. All
    arithmetic is float32, rounded once for each tensor that is written.
    """

    def __init__(self, library: CpuLibrary) -> None:
        self._functions = library.functions

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm of each row.

        Args:
            x: [num_tokens, width], contiguous; left as it is.
            norm: its weight is [width].

        Raises:
            ValueError: shapes, dtypes or strides do not fit.
        """
        out = torch.empty_like(x)
        self._norm(x, None, norm, out)
        return out

    def add_rms_norm(self, x: Tensor, update: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """The sum, which is written over `update`, and its norm.

        Args:
            x: [num_tokens, width], contiguous.
            update: like `x`.
            norm: its weight is [width].

        Raises:
            ValueError: shapes, dtypes or strides do not fit.
        """
        out = torch.empty_like(x)
        self._norm(update, x, norm, out)
        return update, out

    def rotate(self, qk: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate in place.

        Args:
            qk: [num_tokens, heads, head_dim], a token's heads contiguous.
            table: contiguous float32 cosines and sines [num_tokens, 1, head_dim], the sine with the sign of
                the first half.

        Raises:
            ValueError: shapes, dtypes or strides do not fit.
        """
        num_tokens, heads, head_dim = qk.shape
        cos, sin = table
        _check(qk.stride()[1:] == (head_dim, 1) and head_dim % WIDTH_MULTIPLE == 0, qk)
        tables_fit = cos.shape == sin.shape == (num_tokens, 1, head_dim) and _contiguous(cos, sin)
        if not tables_fit or cos.dtype != torch.float32 or sin.dtype != torch.float32:
            raise ValueError("cosines and sines must be contiguous float32 [num_tokens, 1, head_dim]")
        self._functions.tessera_rotate(
            qk.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            num_tokens,
            qk.stride(0),
            heads,
            head_dim,
            ACTIVATION_KINDS[qk.dtype],
            torch.get_num_threads(),
        )
        return qk

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of a contiguous `gate_up` [num_tokens, 2 * width].

        Raises:
            ValueError: the shape or dtype does not fit.
        """
        num_tokens, both = gate_up.shape
        width = both // 2
        _check(both % (2 * WIDTH_MULTIPLE) == 0 and gate_up.is_contiguous(), gate_up)
        out = torch.empty(num_tokens, width, dtype=gate_up.dtype)
        self._functions.tessera_silu_and_mul(
            gate_up.data_ptr(),
            out.data_ptr(),
            num_tokens,
            width,
            ACTIVATION_KINDS[gate_up.dtype],
            torch.get_num_threads(),
        )
        return out

    def _norm(self, residual: Tensor, x: Tensor | None, norm: Norm, out: Tensor) -> None:
        """Add `x`, if given, to `residual` in place, and write the norm of that to `out`."""
        num_tokens, width = residual.shape
        weight = norm.weight
        tensors = (residual, weight) if x is None else (residual, x, weight)
        fits = weight.shape == (width,) and (x is None or x.shape == residual.shape)
        _check(fits and width % WIDTH_MULTIPLE == 0 and _contiguous(*tensors), *tensors)
        self._functions.tessera_add_rms_norm(
            residual.data_ptr(),
            None if x is None else x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            num_tokens,
            width,
            norm.eps,
            ACTIVATION_KINDS[residual.dtype],
            torch.get_num_threads(),
        )


def _contiguous(*tensors: Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)


def _check(fits: bool, *tensors: Tensor) -> None:
    """Refuse tensors that do not fit, differ in dtype, or have one that the library lacks.

    Raises:
        ValueError: so they are.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if not fits or len(dtypes) > 1 or not dtypes <= set(ACTIVATION_KINDS):
        described = ", ".join(f"{t.dtype} {tuple(t.shape)} strides {t.stride()}" for t in tensors)
        raise ValueError(f"no compiled operator for {described}")
