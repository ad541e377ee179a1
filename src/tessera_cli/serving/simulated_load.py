"""What a simulation asks of the engine: the lengths and arrivals of a benchmark, without its token ids."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import Sequence
from tessera_cli.errors import CapacityError, UsageError
from tessera_cli.serving.workload import check_prefix_len, gamma_arrivals, greedy, random_lengths


@dataclass(frozen=True)
class SimulatedLoad:
    """The random requests of `tessera bench`; lengths count tokens, `request_rate` is per second.

    Raises:
        UsageError: a number that lets no request through, or a length, rate or spread that means nothing.
    """

    num_prompts: int
    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    concurrency: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0
    _params: dict[int, SamplingParams] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_prompts < 1:
            raise UsageError("a simulation without requests", hint="give at least one")
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"concurrency {self.concurrency} is below 1", hint="use 1 or more")
        check_prefix_len(self.prefix_len)
        gamma_arrivals(1, self.request_rate, self.seed, burstiness=self.burstiness)
        self.lengths()

    def as_dict(self) -> dict[str, Any]:
        """The load under the names of the options."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.compare}

    def lengths(self) -> Iterator[tuple[int, int]]:
        """Tokens in and out of each request, the shared prefix included."""
        lengths = random_lengths(
            self.num_prompts,
            input_len=self.input_len,
            output_len=self.output_len,
            range_ratio=self.range_ratio,
            seed=self.seed,
        )
        return ((self.prefix_len + num_in, num_out) for num_in, num_out in lengths)

    def arrivals(self) -> list[float] | None:
        """Seconds after the start at which requests are due; None: as soon as there is a place."""
        return gamma_arrivals(self.num_prompts, self.request_rate, self.seed, burstiness=self.burstiness)

    def check_lengths(self, max_model_len: int) -> None:
        """Refuse a load whose longest request may be longer than `max_model_len` tokens.

        Raises:
            CapacityError: it may.
        """
        stretch = 1 + self.range_ratio
        longest = self.prefix_len + int(self.input_len * stretch) + int(self.output_len * stretch)
        if longest > max_model_len:
            raise CapacityError(
                f"requests of up to {longest} tokens are longer than max_model_len={max_model_len}",
                hint="lower --input-len, --output-len or --prefix-len, or raise --max-model-len",
            )

    def sequence(self, index: int, num_in: int, num_out: int) -> Sequence:
        """Request `index`, whose ids say no more than that only the prefix is shared."""
        params = self._params.get(num_out)
        if params is None:
            params = self._params[num_out] = greedy(num_out)
        own = num_in - self.prefix_len - 1
        return Sequence(str(index), [0] * self.prefix_len + [index + 1] + [0] * own, params)
