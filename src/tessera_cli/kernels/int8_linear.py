"""Linear layers with int8 weights, a scale for each output, and int16 activations, a scale for each token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.kernels.cpu_library import CpuLibrary

_INT8_MAX = 127
_PANEL = 16  # outputs side by side in the packed form


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A weight [outputs, inputs] in int8.

    Attributes:
        values: int8 [outputs, inputs]; element times scale is the weight.
        scales: float32 [outputs].
    """

    values: Tensor
    scales: Tensor

    @classmethod
    def quantise(cls, weight: Tensor) -> "Int8Weight":
        """Symmetric, to the nearest: an output's largest magnitude becomes 127.

        Raises:
            ValueError: a weight is not finite.
        """
        weight = weight.detach().float()
        if not bool(weight.isfinite().all()):
            raise ValueError("a weight that is not finite has no int8 form")
        scales = weight.abs().amax(dim=1) / _INT8_MAX
        steps = (weight / scales[:, None]).nan_to_num(0.0).round()  # 0 / 0 of a row of zeros
        return cls(steps.to(torch.int8), scales)


def plain_int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """`x` [num_tokens, inputs] float32 -> [num_tokens, outputs]: what `Int8Linear` approximates."""
    return x @ (weight.values * weight.scales[:, None]).T


class Int8Linear:
    """The product by the compiled library; the weight is held packed, a byte for each element.

    Activations are rounded to 15 bits, or to fewer where a sum over `inputs` could leave 32 bits: 14 bits at
    1,024 inputs, 11 at 8,192.
    """

    def __init__(self, library: CpuLibrary, weight: Int8Weight) -> None:
        self._functions = library.functions
        self.outputs, self.inputs = weight.values.shape
        self._scales = weight.scales.float().contiguous()
        panels, pairs = -(-self.outputs // _PANEL), -(-self.inputs // 2)
        self._packed = torch.empty(panels * _PANEL * pairs * 2, dtype=torch.int8)
        values = weight.values.contiguous()
        self._functions.tessera_int8_pack(
            self._packed.data_ptr(), values.data_ptr(), self.outputs, self.inputs
        )

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [num_tokens, inputs] float32, contiguous -> float32 [num_tokens, outputs].

        A row that is not finite gives NaN.

        Raises:
            ValueError: `x` is something else.
        """
        if x.dtype != torch.float32 or x.shape[1:] != (self.inputs,) or not x.is_contiguous():
            raise ValueError(
                f"expected contiguous float32 [num_tokens, {self.inputs}], got {x.dtype} {x.shape}"
            )
        out = torch.empty(len(x), self.outputs)
        self._functions.tessera_int8_linear(
            out.data_ptr(),
            x.data_ptr(),
            self._packed.data_ptr(),
            self._scales.data_ptr(),
            len(x),
            self.outputs,
            self.inputs,
            torch.get_num_threads(),
        )
        return out
