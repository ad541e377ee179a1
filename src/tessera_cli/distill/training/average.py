"""The exponential moving average of the weights that a run trains."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """average ← decay · average + (1 − decay) · weights after each step, from the first weights on.

    Args:
        parameters: what is trained, by name; float32.
        decay: the share of the average that a step keeps.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self.weights: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        for name, average in self.weights.items():
            average.lerp_(self._parameters[name], 1 - self._decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """In here the model has the average for its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        # One tensor at a time, and contents rather than storage, which a sharded parameter holds on to.
        for name, average in self.weights.items():
            kept = self._parameters[name].detach().clone()
            self._parameters[name].copy_(average)
            average.copy_(kept)
