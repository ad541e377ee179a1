"""The engine's own scheduler and block pool under a load, with a cost model in place of the model.

What runs in which step, who waits, what is shared and who is preempted are decided by the code that serves;
only the time that a step takes is predicted. No tensor is made.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import Sequence
from tessera_cli.serving.cost_model import CostModel
from tessera_cli.serving.quiet_steps import QuietSteps
from tessera_cli.serving.simulated_load import SimulatedLoad
from tessera_cli.serving.simulation_meter import SimulationMeter
from tessera_cli.serving.simulation_result import SimulationResult

_TOKEN = (0,)  # any: every answer is as long as was asked for


@dataclass(frozen=True)
class Progress:
    """How far a simulation is; `seconds` are simulated ones."""

    completed: int
    num_prompts: int
    seconds: float
    num_running: int
    num_waiting: int
    preemptions: int
    kv_cache_usage: float


def simulate(
    config: EngineConfig,
    load: SimulatedLoad,
    cost: CostModel,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    skips_quiet_steps: bool = True,
) -> SimulationResult:
    """Predict how an engine of `config` serves `load` where steps take as long as `cost` says.

    Args:
        on_progress: hears of every step, or run of skipped steps.
        skips_quiet_steps: leave out steps that decide nothing; the result is the same.

    Raises:
        CapacityError: a request may be longer than `config.max_model_len`.
    """
    load.check_lengths(config.max_model_len)
    return _Simulation(config, load, cost, on_progress, skips_quiet_steps).run()


class _Simulation:
    """One run: the load's requests on their way through a scheduler."""

    def __init__(
        self,
        config: EngineConfig,
        load: SimulatedLoad,
        cost: CostModel,
        on_progress: Callable[[Progress], None] | None,
        skips_quiet_steps: bool,
    ) -> None:
        self.load, self.cost, self.on_progress = load, cost, on_progress
        self.scheduler = Scheduler(config, eos_token_ids=())
        self.meter = SimulationMeter(load.num_prompts, config.num_usable_blocks)
        self.skips_quiet_steps = skips_quiet_steps
        self.lengths = enumerate(load.lengths())
        self.due = load.arrivals()
        self.limit = load.num_prompts if load.concurrency is None else load.concurrency
        self.num_submitted = 0
        # Submitted, and not yet the scheduler's: its waiting queue is kept no longer than one step can admit.
        self.backlog: deque[Sequence] = deque()

    def run(self) -> SimulationResult:
        started = time.monotonic()
        while self.num_submitted < self.load.num_prompts or self.meter.num_in_flight:
            self.submit_due()
            if not self.meter.num_in_flight:
                assert self.due is not None
                self.meter.clock = self.due[self.num_submitted]
                continue
            output = self.step()
            if self.skips_quiet_steps and self.meter.is_quiet(output):
                self.skip()
            if self.on_progress is not None:
                self.on_progress(self.progress())
        prefix_cache = self.scheduler.prefix_cache
        return self.meter.result(
            preemptions=self.scheduler.num_preemptions,
            prefix_cache_queries=prefix_cache.num_queries,
            prefix_cache_hits=prefix_cache.num_hits,
            wall_seconds=max(time.monotonic() - started, 1e-9),
        )

    def submit_due(self) -> None:
        while self.has_due(self.meter.clock):
            index, (num_in, num_out) = next(self.lengths)
            due = self.meter.clock if self.due is None else self.due[index]
            self.meter.submit(str(index), due, num_in, num_out)
            self.backlog.append(self.load.sequence(index, num_in, num_out))
            self.num_submitted += 1
        room = self.scheduler.config.max_num_slots - self.scheduler.num_waiting
        while self.backlog and room > 0:
            self.scheduler.add(self.backlog.popleft())
            room -= 1

    def has_due(self, now: float) -> bool:
        """Whether a request is due at `now` and may be submitted."""
        if self.num_submitted == self.load.num_prompts or self.meter.num_in_flight >= self.limit:
            return False
        return self.due is None or self.due[self.num_submitted] <= now

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        tokens = {item.sequence.key: _TOKEN for item in output.scheduled if item.num_samples}
        self.meter.on_schedule(output, self.scheduler.block_pool.num_free_blocks, self.cost)
        finished = self.scheduler.commit(output, tokens)
        self.meter.on_finished(finished)
        return output

    def skip(self) -> None:
        """Let the steps pass that only give each running sequence one more token."""
        running = self.scheduler.queues.running
        steps = QuietSteps(running, self.scheduler.config, self.scheduler.block_pool.num_free_blocks)
        # Who arrives while somebody waits, waits behind him, and can as well be submitted later.
        comes_at_once = not self.scheduler.num_waiting and not self.backlog
        while steps.has_next() and not (comes_at_once and self.has_due(self.meter.clock)):
            self.meter.on_quiet_step(*steps.next(), self.cost)
        if steps.count:
            steps.apply(running)

    def progress(self) -> Progress:
        meter = self.meter
        return Progress(
            completed=meter.num_completed,
            num_prompts=self.load.num_prompts,
            seconds=meter.clock,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting + len(self.backlog),
            preemptions=self.scheduler.num_preemptions,
            kv_cache_usage=1 - self.scheduler.block_pool.num_free_blocks / meter.num_blocks,
        )
