"""The elementwise steps of a decoder layer with gradients, both compiled, in float32 on the CPU.

`models.operators.TorchOperators` defines them. Results and gradients have the same bits on any number of
threads, and but for the gradients of weights a token's do not depend on the tokens beside it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tessera_cli.kernels.cpu_library import CpuLibrary, address
from tessera_cli.kernels.cpu_operators import WIDTH_MULTIPLE, CpuOperators, Norm

_ROWS_PER_BLOCK = 32  # the same number is in training_operators.cpp


class CpuTrainingOperators:
    """Steps by the compiled library, of tensors that `fits` is true of; arguments are left as they are."""

    def __init__(self, library: CpuLibrary) -> None:
        self._library = library

    @staticmethod
    def fits(*tensors: Tensor) -> bool:
        """Whether there is compiled code for them: contiguous float32 rows on the CPU, of whole vectors."""
        return all(
            tensor.is_cpu
            and tensor.dtype == torch.float32
            and tensor.shape[-1] % WIDTH_MULTIPLE == 0
            and tensor.is_contiguous()
            for tensor in tensors
        )

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm of each row of `x` [num_tokens, width]."""
        return _RmsNorm.apply(x, norm.weight, norm.eps, self._library)

    def add_rms_norm(self, x: Tensor, update: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """The sum of two tensors [num_tokens, width], and its norm."""
        return _AddRmsNorm.apply(x, update, norm.weight, norm.eps, self._library)

    def rotate(self, qk: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """`qk` [num_tokens, heads, head_dim] rotated, contiguous.

        A token's heads are contiguous, their size is a multiple of 16; `table` as for `CpuOperators.rotate`.
        """
        return _Rotate.apply(qk, *table, self._library)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of `gate_up` [num_tokens, 2 * width], `width` a multiple of 8."""
        return _SiluAndMul.apply(gate_up, self._library)


class _Parameters:
    """The weight and eps of a norm, where autograd has taken the module apart."""

    def __init__(self, weight: Any, eps: float) -> None:
        self.weight, self.eps = weight, eps


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, library: CpuLibrary) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.library = eps, library
        return CpuOperators(library).rms_norm(x, _Parameters(weight, eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = _norm_backward(ctx, grad, None, needs_weight=ctx.needs_input_grad[1])
        return x_grad, weight_grad, None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, update: Tensor, weight: Tensor, eps: float, library: CpuLibrary
    ) -> tuple[Tensor, Tensor]:
        total = x + update
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.library = eps, library
        return total, CpuOperators(library).rms_norm(total, _Parameters(weight, eps))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total_grad: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = _norm_backward(ctx, grad, total_grad, needs_weight=ctx.needs_input_grad[2])
        return x_grad, x_grad, weight_grad, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qk: Tensor, cos: Tensor, sin: Tensor, library: CpuLibrary) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.library = library
        return _rotated(library, qk, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(ctx.library, grad.contiguous(), cos, sin, -1.0), None, None, None


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, library: CpuLibrary) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.library = library
        return CpuOperators(library).silu_and_mul(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        grad, out = grad.contiguous(), torch.empty_like(gate_up)
        rows, width = grad.shape
        ctx.library.functions.tessera_silu_and_mul_backward(
            gate_up.data_ptr(), grad.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads()
        )
        return out, None


def _norm_backward(
    ctx: Any, grad: Tensor, passed: Tensor | None, *, needs_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of what was normed, and of the weight; `passed` is one that joins the former."""
    x, weight = ctx.saved_tensors
    grad, passed = grad.contiguous(), None if passed is None else passed.contiguous()
    rows, width = x.shape
    x_grad, partial, weight_grad = torch.empty_like(x), None, None
    if needs_weight:
        partial, weight_grad = x.new_empty(-(-rows // _ROWS_PER_BLOCK), width), torch.empty_like(weight)
    ctx.library.functions.tessera_rms_norm_backward(
        x.data_ptr(),
        weight.data_ptr(),
        grad.data_ptr(),
        address(passed),
        x_grad.data_ptr(),
        address(partial),
        address(weight_grad),
        rows,
        width,
        ctx.eps,
        torch.get_num_threads(),
    )
    return x_grad, weight_grad


def _rotated(library: CpuLibrary, qk: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    num_tokens, heads, head_dim = qk.shape
    out = torch.empty(qk.shape)
    library.functions.tessera_rotate_into(
        qk.data_ptr(),
        out.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        num_tokens,
        qk.stride(0),
        heads,
        head_dim,
        sign,
        torch.get_num_threads(),
    )
    return out
