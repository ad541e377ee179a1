"""What an engine and its requests measure; times are seconds on the monotonic clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class EngineStats:
    """An engine at one moment.

    `num_running` and `num_waiting` count sequences now; `num_blocks` counts the usable KV blocks of
    `block_size` tokens, the null block not among them, `num_used_blocks` those that sequences hold and
    `num_cached_blocks` those that nobody holds and the prefix cache finds.

    The others count since the engine was made: `num_finished` the sequences that ended by a stop token or
    their length, `num_failed` those that ended with an error; `prompt_tokens` the prompt tokens computed or
    found in the prefix cache, each once even if preemption made the engine compute it again;
    `generation_tokens` the tokens sampled; `prefix_cache_queries` the tokens of the requests that looked into
    the prefix cache when they were first admitted, `prefix_cache_hits` those found; `num_forks` the samples
    made from another's prompt, `num_block_copies` the shared blocks copied for who wrote to them.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_finished: int
    num_failed: int
    num_blocks: int
    num_used_blocks: int
    block_size: int
    prompt_tokens: int
    generation_tokens: int
    num_steps: int
    num_cached_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_forks: int = 0
    num_block_copies: int = 0


@dataclass(slots=True)
class LatencyTotals:
    """Sums of seconds over all samples since the engine was made, with how many each is of.

    `ttft` is of `num_first_tokens`, the first token of each sample; `itl` of `num_later_tokens`, all others.
    """

    ttft: float = 0.0
    num_first_tokens: int = 0
    itl: float = 0.0
    num_later_tokens: int = 0

    def count_last_of(self, metrics: "RequestMetrics") -> None:
        """Count the newest token of a sample."""
        times = metrics.token_times
        if len(times) == 1:
            self.ttft += times[0] - metrics.arrival_time
            self.num_first_tokens += 1
        else:
            self.itl += times[-1] - times[-2]
            self.num_later_tokens += 1


@dataclass
class RequestMetrics:
    """When things happened to one sample of a request.

    `token_times` has the end of the step of each output token; `num_cached_tokens` of the prompt were found
    in the prefix cache.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    token_times: list[float] = field(default_factory=list)
    finished_time: float | None = None
    num_cached_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival, waiting included."""
        return self.token_times[0] - self.arrival_time if self.token_times else None

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies, one fewer than there are output tokens."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for fewer than two tokens."""
        if len(self.token_times) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (len(self.token_times) - 1)

    @property
    def e2el(self) -> float | None:
        """End-to-end latency: from arrival to finish."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile of `values`, 0 to 100, with linear interpolation between ranks.

    Raises:
        ValueError: no values, or `percent` out of range.
    """
    if not values:
        raise ValueError("no values, so no percentile")
    if not 0 <= percent <= 100:
        raise ValueError(f"percent={percent} is not within 0 to 100")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (high - low) * (rank - math.floor(rank))
