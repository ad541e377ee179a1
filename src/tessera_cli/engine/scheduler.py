"""Which sequences run in the next step: admission, block allocation and preemption, in one place.

The scheduler's product is an ownership contract. `schedule()` does all admission, block allocation and
preemption, and returns the exact set to run. The engine runs that set and never changes scheduler state
mid-step; only `commit` or `rollback` does.

Everything is in order of arrival. Admission takes the head of the waiting queue and never skips it: small
requests wait behind a large head, which is what bounds the head's own wait. Evict the newest, restart the
cheapest: preemption takes the newest running sequence and puts it in front of the waiting ones, its tokens
intact, to be computed again. So running sequences are always older than waiting ones.

A sequence is admitted only when the older ones have left some of the token budget. So every running sequence
runs in every step, only the newest can still be in its prefill, oldest first means decodes first, and a
victim, which is never older than who asks, is not yet in the step's set.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tessera_cli.engine.block_pool import BlockPool
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from tessera_cli.engine.sequence import FinishReason, SampleError, Sequence, SequenceStatus
from tessera_cli.errors import CapacityError, UsageError


@dataclass
class _Step:
    """A step from `schedule` to `commit` or `rollback`."""

    budget: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    aborted: list[Sequence] = field(default_factory=list)
    output: SchedulerOutput | None = None


class Scheduler:
    """Continuous batching over one block pool, without tensors.

    `EngineConfig` guarantees that one sequence of `max_model_len` tokens fits the pool, so the oldest running
    sequence can always go on once all newer ones are preempted.
    """

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...]) -> None:
        self.config = config
        self.block_pool = BlockPool(config.num_blocks)
        self.num_preemptions = 0
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._step: _Step | None = None

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none: not yet admitted, or preempted."""
        return len(self._waiting)

    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence behind all others; allowed during a step.

        Raises:
            UsageError: an empty prompt, or a request id that is still in use.
            CapacityError: a prompt that leaves no room for output in `max_model_len`.
        """
        name = f"request {sequence.request_id!r}"
        if sequence.request_id in self._sequences:
            raise UsageError(f"{name} is already in the engine", hint="give each live request its own id")
        if sequence.num_tokens == 0:
            raise UsageError(f"{name} has an empty prompt", hint="give at least one token")
        if sequence.num_tokens >= self.config.max_model_len:
            raise CapacityError(
                f"{name} has a prompt of {sequence.num_tokens} tokens, which leaves no room for output in"
                f" max_model_len={self.config.max_model_len}",
                hint=f"shorten the prompt to {self.config.max_model_len - 1} tokens or raise max_model_len",
            )
        self._sequences[sequence.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """End a sequence; False if there is none of that id, or it is already being aborted.

        Outside a step its blocks are free at once. During a step it is only marked, because the step may be
        writing its blocks: `commit` or `rollback` ends it, and `commit` returns it with the finished.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.aborted:
            return False
        sequence.aborted = True
        if self._step is None:
            self._finish(sequence, FinishReason.ABORT)
        else:
            self._step.aborted.append(sequence)
        return True

    def schedule(self) -> SchedulerOutput:
        """Choose the next step and take its blocks; empty only when nothing is unfinished.

        Raises:
            RuntimeError: the previous step was neither committed nor rolled back.
        """
        if self._step is not None:
            raise RuntimeError("the previous step was neither committed nor rolled back")
        step = _Step(budget=self.config.max_num_batched_tokens)
        self._schedule_running(step)
        # Admits nobody after a preemption: the head is then the last victim, and it needs more blocks than
        # are left of its own.
        self._schedule_waiting(step)
        if not step.scheduled and self._sequences:
            raise RuntimeError(
                f"nothing can be scheduled and {len(self._sequences)} sequences are unfinished"
            )
        num_scheduled_tokens = self.config.max_num_batched_tokens - step.budget
        step.output = SchedulerOutput(tuple(step.scheduled), tuple(step.preempted), num_scheduled_tokens)
        self._step = step
        return step.output

    def commit(self, output: SchedulerOutput, sampled: Mapping[str, int | SampleError]) -> list[Sequence]:
        """Take a step's results: one token, or the reason for its lack, per sequence that samples.

        Returns:
            The sequences that this step ended, those aborted during it included; a token that was sampled for
            an aborted sequence is dropped.

        Raises:
            RuntimeError: `output` is not the outstanding step.
            ValueError: `sampled` has other request ids than the step samples; the step stays outstanding.
        """
        step = self._outstanding(output)
        expected = {item.sequence.request_id for item in output.scheduled if item.samples}
        if sampled.keys() != expected:
            raise ValueError(f"the step samples {sorted(expected)}, and tokens came for {sorted(sampled)}")
        finished = []
        for item in output.scheduled:
            sequence = item.sequence
            sequence.num_computed_tokens += item.num_scheduled_tokens
            if item.samples and not sequence.aborted:
                reason = self._take_token(sequence, sampled[sequence.request_id])
                if reason is not None:
                    self._finish(sequence, reason)
                    finished.append(sequence)
        for sequence in step.aborted:
            self._finish(sequence, FinishReason.ABORT)
        self._step = None
        return finished + step.aborted

    def rollback(self) -> None:
        """Undo a step that failed, wherever it was: what it computed and sampled counts for nothing.

        Ctrl-C may come between any two lines of `schedule` and `commit`, so queues and pool are made anew
        from the live sequences. Those with computed tokens go on with their blocks; the others wait and hold
        none. Who was preempted stays so: the step may have written into the blocks that it took. What it
        wrote into blocks that stay with their owner is at positions not yet computed. A sequence that a torn
        `commit` had already ended stays ended.
        """
        for item in self._step.scheduled if self._step is not None else ():
            item.sequence.num_computed_tokens = item.start
            if item.samples:
                del item.sequence.token_ids[item.start + item.num_scheduled_tokens :]
        self._step = None
        for sequence in list(self._sequences.values()):
            sequence.error = None
            if not sequence.block_table or not sequence.num_computed_tokens or sequence.aborted:
                sequence.block_table.clear()
                sequence.num_computed_tokens = 0
                if sequence.status is SequenceStatus.RUNNING:
                    sequence.status = SequenceStatus.PREEMPTED
            if sequence.aborted:
                self._forget(sequence, FinishReason.ABORT)
        live = self._sequences.values()
        self._running = [sequence for sequence in live if sequence.block_table]
        self._waiting = deque(sequence for sequence in live if not sequence.block_table)
        self.block_pool = BlockPool(self.config.num_blocks, [sequence.block_table for sequence in live])

    def check_invariants(self) -> None:
        """Check what holds between any two calls; cheap enough to run after every step of a test.

        Raises:
            AssertionError: the books do not balance.
        """
        live = [*self._running, *self._waiting]
        if live != list(self._sequences.values()):
            raise AssertionError("the queues do not hold every live sequence once, in order of arrival")
        if len(self._running) > min(self.config.max_num_seqs, self.config.max_num_batched_tokens):
            raise AssertionError(f"{len(self._running)} sequences run")
        for sequence in self._running:
            num_computed = sequence.num_computed_tokens
            num_slots = len(sequence.block_table) * self.config.block_size
            is_running = sequence.status is SequenceStatus.RUNNING
            if not is_running or num_computed > num_slots or num_computed >= sequence.num_tokens:
                raise AssertionError(f"{sequence} runs, beyond its blocks or its tokens")
            is_decode = num_computed == sequence.num_tokens - 1
            if self._step is None and not is_decode and sequence is not self._running[-1]:
                raise AssertionError(f"{sequence} is in its prefill and not the newest")
        for sequence in self._waiting:
            is_waiting = sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            if not is_waiting or sequence.num_computed_tokens or sequence.block_table:
                raise AssertionError(f"{sequence} waits, and holds something")
        self.block_pool.check_invariants(sequence.block_table for sequence in live)

    def _schedule_running(self, step: _Step) -> None:
        """Give every running sequence its next tokens, oldest first, preempting from the newest end."""
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            count = self._num_missing_blocks(sequence)
            while count > self.block_pool.num_free_blocks and len(self._running) > index:
                self._preempt_newest(step)
            if len(self._running) == index:
                return  # it was itself the newest
            self._take(step, sequence, count)
            index += 1

    def _schedule_waiting(self, step: _Step) -> None:
        """Admit from the head of the queue while blocks, the budget and `max_num_seqs` allow."""
        while self._waiting and step.budget > 0 and len(self._running) < self.config.max_num_seqs:
            sequence = self._waiting[0]
            # All blocks of the present tokens are reserved before the first chunk runs: a prefill in progress
            # never asks for more.
            count = self._num_missing_blocks(sequence)
            if count > self.block_pool.num_free_blocks:
                return
            if not self.config.enable_chunked_prefill and sequence.num_tokens > step.budget:
                return
            self._running.append(self._waiting.popleft())
            sequence.status = SequenceStatus.RUNNING
            self._take(step, sequence, count)

    def _take(self, step: _Step, sequence: Sequence, num_new_blocks: int) -> None:
        """Enter `sequence` into the step with its new blocks and as many tokens as the budget has left."""
        sequence.block_table += self.block_pool.allocate(num_new_blocks)
        start = sequence.num_computed_tokens
        num_tokens = min(sequence.num_tokens - start, step.budget)
        samples = start + num_tokens == sequence.num_tokens
        step.scheduled.append(ScheduledSequence(sequence, num_tokens, start, samples))
        step.budget -= num_tokens

    def _preempt_newest(self, step: _Step) -> None:
        """Take all blocks from the newest running sequence; it waits in front, its tokens intact."""
        sequence = self._running.pop()
        self._release(sequence)
        sequence.num_computed_tokens = 0
        sequence.status = SequenceStatus.PREEMPTED
        self._waiting.appendleft(sequence)
        step.preempted.append(sequence)
        self.num_preemptions += 1

    def _take_token(self, sequence: Sequence, token: int | SampleError) -> FinishReason | None:
        if isinstance(token, SampleError):
            sequence.error = token.message
            return FinishReason.ERROR
        sequence.token_ids.append(token)
        return sequence.reason_to_finish(self._eos_token_ids, self.config.max_model_len)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release(sequence)
        self._forget(sequence, reason)

    def _forget(self, sequence: Sequence, reason: FinishReason) -> None:
        del self._sequences[sequence.request_id]
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason

    def _release(self, sequence: Sequence) -> None:
        self.block_pool.free(sequence.block_table)
        sequence.block_table.clear()

    def _num_missing_blocks(self, sequence: Sequence) -> int:
        return self.config.blocks_for(sequence.num_tokens) - len(sequence.block_table)

    def _outstanding(self, output: SchedulerOutput) -> _Step:
        if self._step is None or self._step.output is not output:
            raise RuntimeError("this step is not the outstanding one")
        return self._step
