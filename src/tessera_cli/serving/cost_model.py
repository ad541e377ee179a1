"""How long a step takes, from what is in it: a roofline, or a sum that was fitted to measurements."""

from dataclasses import dataclass
from typing import Protocol

from tessera_cli.errors import UsageError
from tessera_cli.models.config import ModelConfig
from tessera_cli.serving.gpus import Gpu

DEFAULT_STEP_OVERHEAD = 0.003  # seconds


@dataclass(frozen=True, slots=True)
class StepLoad:
    """One step in numbers.

    `num_context_tokens` counts the cached tokens that attention reads: each sequence's, its new ones
    included; `num_attention_pairs` the pairs of a new token and a token that it sees.
    """

    num_tokens: int
    num_samples: int
    num_context_tokens: int
    num_attention_pairs: int


class CostModel(Protocol):
    """Tells what a step costs."""

    def step_seconds(self, load: StepLoad) -> float:
        """Seconds of one step, more than zero."""
        ...


@dataclass(frozen=True)
class LinearCost:
    """Seconds per step, per scheduled token, and per cached token that is read."""

    per_step: float
    per_token: float
    per_context_token: float

    def step_seconds(self, load: StepLoad) -> float:
        return (
            self.per_step
            + self.per_token * load.num_tokens
            + self.per_context_token * load.num_context_tokens
        )


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peak arithmetic and of the peak bandwidth that are reached; the defaults are assumptions.

    Raises:
        UsageError: one that is no share.
    """

    compute: float = 0.5
    memory: float = 0.7

    def __post_init__(self) -> None:
        for name, share in (("compute", self.compute), ("memory", self.memory)):
            if not 0 < share <= 1:
                raise UsageError(f"{name} efficiency {share} is no share", hint="more than 0, at most 1")


class RooflineCost:
    """Each part of a step at the speed of what it lacks most, arithmetic or memory (Williams et al., 2009).

    The parts are the layers' matrices, the head for the rows that are sampled, and attention; each takes the
    longer of its arithmetic and its reads. Sliding windows are counted as full attention.
    """

    def __init__(
        self,
        model: ModelConfig,
        gpu: Gpu,
        *,
        weight_bytes: int,
        kv_bytes_per_token: int,
        efficiency: Efficiency,
        step_overhead: float = DEFAULT_STEP_OVERHEAD,
    ) -> None:
        """Price the steps of `model` on `gpu`.

        Args:
            weight_bytes: of one parameter.
            kv_bytes_per_token: of keys and values over all layers.
            efficiency: what of the GPU's peaks is reached.
            step_overhead: seconds of a step that are neither: scheduling, launches, sampling.
        """
        flops, bandwidth = gpu.flops * efficiency.compute, gpu.memory_bandwidth * efficiency.memory
        head = model.vocab_size * model.hidden_size
        layers = model.num_matmul_parameters - head
        self._overhead = step_overhead
        self._layers_read = layers * weight_bytes / bandwidth
        self._layers_per_token = 2 * layers / flops
        self._head_read = head * weight_bytes / bandwidth
        self._head_per_sample = 2 * head / flops
        self._read_per_context_token = kv_bytes_per_token / bandwidth
        # Two products of a multiplication and an addition for each pair and each element of a head.
        per_pair = 4 * model.num_hidden_layers * model.num_attention_heads * model.head_dim
        self._attend_per_pair = per_pair / flops

    def step_seconds(self, load: StepLoad) -> float:
        layers = max(self._layers_read, self._layers_per_token * load.num_tokens)
        head = max(self._head_read, self._head_per_sample * load.num_samples) if load.num_samples else 0.0
        attention = max(
            self._read_per_context_token * load.num_context_tokens,
            self._attend_per_pair * load.num_attention_pairs,
        )
        return self._overhead + layers + head + attention
