"""The elementwise steps of a decoder layer, which an engine may compute by compiled code instead."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from tessera_cli.models.rope import RotaryTable, rotate


class Norm(Protocol):
    """An RMS norm, which is a module that may be called."""

    eps: float
    weight: nn.Parameter

    def __call__(self, x: Tensor) -> Tensor: ...


class Operators(Protocol):
    """What lies between a layer's products. Arguments may be overwritten, but for `x`, weights and tables."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """`norm` of `x` `[num_tokens, width]`."""
        ...

    def add_rms_norm(self, x: Tensor, update: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """The sum of `x` and `update` `[num_tokens, width]`, and `norm` of it."""
        ...

    def rotate(self, qk: Tensor, table: RotaryTable) -> Tensor:
        """Rotate heads `[num_tokens, heads, head_dim]` by a `rope.rotary_table`."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of `[num_tokens, 2 * width]`, the gate first: `[num_tokens, width]`."""
        ...


class TorchOperators:
    """Plain torch, on any device and with gradients; what every other one is held to."""

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Operators`. The module itself is called, for those who watch it."""
        return norm(x)

    def add_rms_norm(self, x: Tensor, update: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """See `Operators`."""
        total = add(x, update)
        return total, norm(total)

    def rotate(self, qk: Tensor, table: RotaryTable) -> Tensor:
        """See `Operators`."""
        return rotate(qk, table)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See `Operators`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def add(x: Tensor, update: Tensor) -> Tensor:
    """`x + update`.

    In place into `update`, which nobody else holds and no gradient needs; never into `x`. Under autocast
    `update` is narrower, and the sum has to stay as wide as `x`.
    """
    return update.add_(x) if update.dtype == x.dtype else x + update
