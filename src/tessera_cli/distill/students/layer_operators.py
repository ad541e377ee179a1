"""The elementwise steps of a decoder in training: compiled, with gradients, wherever that is possible."""

from functools import cache

import torch
from torch import Tensor

from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
from tessera_cli.kernels.training_operators import CpuTrainingOperators
from tessera_cli.models.operators import Norm, TorchOperators
from tessera_cli.models.rope import RotaryTable


class TrainingOperators(TorchOperators):
    """Steps by compiled code where it has the tensors' type, place and width, else by plain torch.

    torch.compile sees plain torch, which it makes code of itself. Norms that are computed here are not called
    as modules: whoever watches them passes `TorchOperators`.
    """

    def __init__(self, compiled: CpuTrainingOperators) -> None:
        self._compiled = compiled

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Operators`."""
        if self._fits(x, norm.weight):
            return self._compiled.rms_norm(x, norm)
        return super().rms_norm(x, norm)

    def add_rms_norm(self, x: Tensor, update: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """See `Operators`."""
        if self._fits(x, update, norm.weight):
            return self._compiled.add_rms_norm(x, update, norm)
        return super().add_rms_norm(x, update, norm)

    def rotate(self, qk: Tensor, table: RotaryTable) -> Tensor:
        """See `Operators`."""
        heads_fit = qk.shape[-1] % 16 == 0 and qk.stride()[1:] == (qk.shape[-1], 1)
        if heads_fit and qk.is_cpu and qk.dtype == torch.float32 and self._fits(*table):
            return self._compiled.rotate(qk, table)
        return super().rotate(qk, table)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operators`."""
        if gate_up.shape[-1] % 16 == 0 and self._fits(gate_up):
            return self._compiled.silu_and_mul(gate_up)
        return super().silu_and_mul(gate_up)

    def _fits(self, *tensors: Tensor) -> bool:
        return not torch.compiler.is_compiling() and self._compiled.fits(*tensors)


@cache
def training_operators() -> TorchOperators:
    """Those that this machine has."""
    library = load_library()
    if not isinstance(library, CpuLibrary):
        return TorchOperators()
    return TrainingOperators(CpuTrainingOperators(library))
