"""Linear layers in float32 whose results do not depend on the batch."""

import torch
from torch import Tensor

from tessera_cli.kernels.cpu_library import CpuLibrary, Linear, address


class Float32Linear:
    """`F.linear` by the compiled library, on a packed copy of the weight.

    An output is one chain of multiply-adds in the order of the inputs: a row's result has the same bits alone
    and in any batch, on any number of threads.
    """

    def __init__(self, library: CpuLibrary, weight: Tensor, *, in_place: bool = False) -> None:
        """Pack `weight` [outputs, inputs], float32 on the CPU; its own memory is not needed any more.

        With `in_place` the packed copy takes that memory, if the outputs fill whole panels: half the memory,
        and none for which the system has to find pages.

        Raises:
            ValueError: it is something else.
        """
        if weight.dtype != torch.float32 or weight.dim() != 2 or not weight.is_cpu:
            raise ValueError(
                f"expected float32 [outputs, inputs] on the CPU, got {weight.dtype} {tuple(weight.shape)}"
            )
        self._functions = library.functions
        self.outputs, self.inputs = weight.shape
        columns = library.functions.tessera_panel_columns()
        if in_place and weight.is_contiguous() and self.outputs % columns == 0:
            # A panel is made of the rows whose place it takes.
            self._panels = weight.view(-1, self.inputs, columns)
        else:
            self._panels = torch.empty(-(-self.outputs // columns), self.inputs, columns)
            weight = weight.contiguous()
        self._functions.tessera_float32_pack(
            self._panels.data_ptr(), weight.data_ptr(), self.outputs, self.inputs, torch.get_num_threads()
        )

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [num_tokens, inputs] float32, contiguous -> float32 [num_tokens, outputs].

        Raises:
            ValueError: `x` is something else.
        """
        check_activations(x, self.inputs)
        num_tokens = x.shape[0]
        out = torch.empty(num_tokens, self.outputs)
        self._functions.tessera_float32_linear(
            out.data_ptr(),
            x.data_ptr(),
            self._panels.data_ptr(),
            num_tokens,
            self.outputs,
            self.inputs,
            torch.get_num_threads(),
        )
        return out

    def described(self, bias: Tensor | None) -> Linear:
        """What `tessera_decoder_layers` is told of it and of `bias` [outputs]; both must outlive that."""
        return Linear(self._panels.data_ptr(), None, address(bias), self.outputs, self.inputs, 0.0)

    def rows(self, index: Tensor) -> Tensor:
        """The rows `index` (int64 [n]) of the weight: float32 [n, inputs]."""
        columns = self._panels.shape[2]
        return self._panels[index // columns, :, index % columns]


def check_activations(x: Tensor, inputs: int) -> None:
    """Refuse what is not contiguous float32 [num_tokens, inputs] on the CPU.

    Raises:
        ValueError: `x` is something else.
    """
    fits = x.dtype == torch.float32 and x.shape[1:] == (inputs,)
    if not (fits and x.is_contiguous() and x.is_cpu):
        raise ValueError(
            f"expected contiguous float32 [num_tokens, {inputs}], got {x.dtype} {tuple(x.shape)}"
            f" with strides {x.stride()} on {x.device}"
        )
