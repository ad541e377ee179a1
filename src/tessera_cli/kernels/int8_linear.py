"""Linear layers with int8 weights, a scale for each output, and int16 activations, a scale for each token."""

import torch
from torch import Tensor

from tessera_cli.int8_weight import Int8Weight
from tessera_cli.kernels.cpu_library import CpuLibrary, Linear, address
from tessera_cli.kernels.float32_linear import check_activations

_INT16_MAX, _INT32_MAX = 2**15 - 1, 2**31 - 1
_GROUP = 4  # the packed form has whole groups of so many inputs


def plain_int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """`x` [num_tokens, inputs] float32 -> [num_tokens, outputs]: what `Int8Linear` approximates."""
    return x @ weight.dequantise().T


class Int8Linear:
    """The product by the compiled library; the weight is held packed, a byte for each element.

    Activations are rounded to 15 bits and a sign, or to fewer where a sum of products could leave 32 bits: it
    cannot while their largest magnitude times the largest sum of an output's magnitudes fits. Weights of a
    normal distribution leave 15 bits up to about 2,500 inputs and 13 at 8,192. Sums are exact: a row's result
    has the same bits alone and in any batch, on any number of threads.
    """

    def __init__(self, library: CpuLibrary, weight: Int8Weight, *, in_place: bool = False) -> None:
        """Pack `weight`; its own memory is not needed any more.

        With `in_place` the packed copy takes that memory, if nothing has to be padded.
        """
        self._functions = library.functions
        self.outputs, self.inputs = weight.values.shape
        self._scales = weight.scales.float().contiguous()
        values = weight.values.contiguous()
        self._largest = min(_INT16_MAX, _INT32_MAX // max(1, _largest_sum(values)))
        columns = library.functions.tessera_panel_columns()
        shape = -(-self.outputs // columns), -(-self.inputs // _GROUP) * _GROUP // 2, columns, 2
        fits = self.outputs % columns == 0 and self.inputs % _GROUP == 0
        self._panels = values.view(shape) if in_place and fits else torch.empty(shape, dtype=torch.int8)
        self._functions.tessera_int8_pack(
            self._panels.data_ptr(), values.data_ptr(), self.outputs, self.inputs, torch.get_num_threads()
        )

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [num_tokens, inputs] float32, contiguous -> float32 [num_tokens, outputs].

        A row that is not finite gives NaN.

        Raises:
            ValueError: `x` is something else.
        """
        check_activations(x, self.inputs)
        num_tokens = x.shape[0]
        out = torch.empty(num_tokens, self.outputs)
        self._functions.tessera_int8_linear(
            out.data_ptr(),
            x.data_ptr(),
            self._panels.data_ptr(),
            self._scales.data_ptr(),
            self._largest,
            num_tokens,
            self.outputs,
            self.inputs,
            torch.get_num_threads(),
        )
        return out

    def described(self, bias: Tensor | None) -> Linear:
        """What `tessera_decoder_layers` is told of it and of `bias` [outputs]; both must outlive that."""
        return Linear(
            self._panels.data_ptr(),
            self._scales.data_ptr(),
            address(bias),
            self.outputs,
            self.inputs,
            self._largest,
        )

    def rows(self, index: Tensor) -> Tensor:
        """The rows `index` (int64 [n]) of the weight, times their scales: float32 [n, inputs]."""
        columns = self._panels.shape[2]
        values = self._panels[index // columns, :, index % columns].flatten(1)[:, : self.inputs]
        return values * self._scales[index, None]


def _largest_sum(values: Tensor) -> int:
    """Of the magnitudes of an output's elements, over all outputs."""
    return max(int(rows.short().abs().sum(dim=1).max()) for rows in values.split(1024))
