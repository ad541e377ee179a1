"""Linear layers with int8 weights, a scale for each output, and int16 activations, a scale for each token."""

import torch
from torch import Tensor

from tessera_cli.int8_weight import Int8Weight
from tessera_cli.kernels.cpu_library import CpuLibrary

_PANEL = 16  # outputs side by side in the packed form


def plain_int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """`x` [num_tokens, inputs] float32 -> [num_tokens, outputs]: what `Int8Linear` approximates."""
    return x @ weight.dequantise().T


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

    def rows(self, index: Tensor) -> Tensor:
        """The rows `index` (int64 [n]) of the weight, times their scales: float32 [n, inputs]."""
        panels = self._packed.view(-1, -(-self.inputs // 2), _PANEL, 2)
        values = panels[index // _PANEL, :, index % _PANEL].flatten(1)[:, : self.inputs]
        return values * self._scales[index, None]
