"""A weight in int8 with a scale for each output: what kernels and models have to agree on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_INT8_MAX = 127


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A weight [outputs, inputs] in int8.

    Attributes:
        values: int8 [outputs, inputs]; element times scale is the weight.
        scales: float32 [outputs].
    """

    values: "Tensor"
    scales: "Tensor"

    @classmethod
    def quantise(cls, weight: "Tensor") -> "Int8Weight":
        """Symmetric, to the nearest: an output's largest magnitude becomes 127.

        Raises:
            ValueError: a weight is not finite.
        """
        weight = weight.detach().float()
        if not bool(weight.isfinite().all()):
            raise ValueError("a weight that is not finite has no int8 form")
        scales = weight.abs().amax(dim=1) / _INT8_MAX
        steps = (weight / scales[:, None]).nan_to_num_(0.0).round_()  # 0 / 0 of a row of zeros
        # The scale of a row of subnormal numbers is rounded, perhaps to zero.
        return cls(steps.clamp_(-_INT8_MAX, _INT8_MAX).char(), scales)

    def dequantise(self) -> "Tensor":
        """The weight that it stands for, float32 [outputs, inputs]."""
        return self.values * self.scales[:, None]
