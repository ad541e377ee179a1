"""The clock of a simulation, and what it measures of requests and blocks."""

from array import array
from dataclasses import dataclass

from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import Sequence
from tessera_cli.serving.cost_model import CostModel, StepLoad
from tessera_cli.serving.load_result import Distribution
from tessera_cli.serving.simulation_result import SimulationResult


@dataclass(slots=True)
class _Request:
    """One in flight; `waits_since` is the time of its last token while it is preempted."""

    due: float
    num_in: int
    num_out: int
    first_token: float | None = None
    waits_since: float | None = None


class SimulationMeter:
    """Adds up steps and requests.

    Attributes:
        clock: simulated seconds since the start.
        num_completed: requests that have ended.
        num_blocks: usable KV blocks.
    """

    def __init__(self, num_prompts: int, num_blocks: int) -> None:
        self.clock = 0.0
        self.num_completed = 0
        self.num_blocks = num_blocks
        self._thirds = num_prompts // 3, num_prompts * 2 // 3
        self._in_flight: dict[str, _Request] = {}
        self._num_submitted = 0
        self._found_in_flight = [0, 0, 0]
        self._num_waiting_again = 0
        self._ttft, self._tpot, self._e2el = array("d"), array("d"), array("d")
        self._gaps: dict[float, int] = {}
        self._num_steps = 0
        self._num_in = self._num_out = 0
        self._peak_requests = self._peak_used_blocks = 0
        self._used_block_seconds = 0.0
        self._decodes_only = False

    @property
    def num_in_flight(self) -> int:
        """Requests that are submitted and have not ended."""
        return len(self._in_flight)

    def submit(self, request_id: str, due: float, num_in: int, num_out: int) -> None:
        """Take a request that was due at `due`."""
        third = (self._num_submitted >= self._thirds[0]) + (self._num_submitted >= self._thirds[1])
        self._found_in_flight[third] += len(self._in_flight)
        self._num_submitted += 1
        self._in_flight[request_id] = _Request(due, num_in, num_out)
        self._peak_requests = max(self._peak_requests, len(self._in_flight))

    def on_schedule(self, output: SchedulerOutput, num_free_blocks: int, cost: CostModel) -> None:
        """Let a step pass that leaves `num_free_blocks` free; its tokens are there at its end."""
        for sequence in output.preempted:
            request = self._in_flight[sequence.request_id]
            if request.first_token is not None and request.waits_since is None:
                request.waits_since = self.clock  # it ran in the step before, as all that run do
                self._num_waiting_again += 1
        num_samples = num_context_tokens = num_pairs = num_decodes = 0
        special: list[str] = []
        for item in output.scheduled:
            count, start = item.num_scheduled_tokens, item.start
            num_context_tokens += start + count
            num_pairs += count * start + count * (count + 1) // 2
            if item.num_samples:
                num_samples += 1
                if start + count == item.sequence.num_prompt_tokens or self._num_waiting_again:
                    special.append(item.sequence.request_id)
            num_decodes += count == 1
        load = StepLoad(output.num_scheduled_tokens, num_samples, num_context_tokens, num_pairs)
        seconds = self._pass(load, num_free_blocks, cost)
        for request_id in special:
            self._take_special(self._in_flight[request_id], seconds)
        self._count_gaps(seconds, num_samples - len(special))
        self._decodes_only = num_decodes == num_samples == len(output.scheduled) and not special

    def on_quiet_step(self, load: StepLoad, num_free_blocks: int, cost: CostModel) -> None:
        """Let a step pass in which every sequence gets one more token."""
        self._count_gaps(self._pass(load, num_free_blocks, cost), load.num_samples)

    def on_finished(self, finished: list[Sequence]) -> None:
        """Take the requests that the step has ended."""
        for sequence in finished:
            request = self._in_flight.pop(sequence.request_id)
            assert request.first_token is not None
            self.num_completed += 1
            self._num_in += request.num_in
            self._num_out += request.num_out
            self._ttft.append(request.first_token - request.due)
            self._e2el.append(self.clock - request.due)
            if request.num_out > 1:
                self._tpot.append((self.clock - request.first_token) / (request.num_out - 1))
        self._decodes_only = self._decodes_only and not finished

    def is_quiet(self, output: SchedulerOutput) -> bool:
        """Whether the step just taken only decoded, and nobody came, went or was preempted."""
        return self._decodes_only and not output.preempted

    def result(
        self, *, preemptions: int, prefix_cache_queries: int, prefix_cache_hits: int, wall_seconds: float
    ) -> SimulationResult:
        """The figures of the whole run."""
        first, second = self._thirds
        counts = max(second - first, 1), max(self._num_submitted - second, 1)
        return SimulationResult(
            completed=self.num_completed,
            total_input_tokens=self._num_in,
            total_output_tokens=self._num_out,
            duration=self.clock,
            max_concurrent_requests=self._peak_requests,
            preemptions=preemptions,
            num_steps=self._num_steps,
            prefix_cache_queries=prefix_cache_queries,
            prefix_cache_hits=prefix_cache_hits,
            peak_kv_cache_usage=self._peak_used_blocks / self.num_blocks,
            mean_kv_cache_usage=self._used_block_seconds / self.clock / self.num_blocks,
            mean_in_flight=(self._found_in_flight[1] / counts[0], self._found_in_flight[2] / counts[1]),
            latencies={
                "ttft": Distribution.of(self._ttft),
                "tpot": Distribution.of(self._tpot),
                "itl": Distribution(self._gaps),
                "e2el": Distribution.of(self._e2el),
            },
            wall_seconds=wall_seconds,
        )

    def _pass(self, load: StepLoad, num_free_blocks: int, cost: CostModel) -> float:
        seconds = cost.step_seconds(load)
        self.clock += seconds
        self._num_steps += 1
        num_used = self.num_blocks - num_free_blocks
        self._peak_used_blocks = max(self._peak_used_blocks, num_used)
        self._used_block_seconds += num_used * seconds
        return seconds

    def _take_special(self, request: _Request, seconds: float) -> None:
        """A first token, or one that may be the first after a preemption."""
        if request.first_token is None:
            request.first_token = self.clock
        elif request.waits_since is None:
            self._count_gaps(seconds, 1)
        else:
            self._count_gaps(self.clock - request.waits_since, 1)
            request.waits_since = None
            self._num_waiting_again -= 1

    def _count_gaps(self, seconds: float, count: int) -> None:
        if count:
            self._gaps[seconds] = self._gaps.get(seconds, 0) + count
