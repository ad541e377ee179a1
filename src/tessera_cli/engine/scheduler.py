"""Which sequences run in the next step: admission, block allocation and preemption, in one place.

The scheduler's product is an ownership contract. `schedule()` does all admission, block allocation and
preemption, and returns the exact set to run. The engine runs that set and never changes scheduler state
mid-step; only `commit` (or `rollback`) does.

Evict the newest, restart the cheapest: preemption takes the worst running sequence, which under "fcfs" is the
newest, and it starts again from those of its blocks that nobody has overwritten meanwhile.

The best-ranked sequence computes at least a token in each step, and any sequence fits the pool alone. So
the best ends within `max_model_len` steps, whatever comes behind it: under "fcfs" a sequence waits at most
`max_model_len` steps for each one that came before it. Under "priority" it waits as long as more urgent
ones keep coming.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from tessera_cli.engine.admission import check_request
from tessera_cli.engine.block_pool import BlockPool
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.invariants import check_books
from tessera_cli.engine.prefix_cache import PrefixCache
from tessera_cli.engine.queues import Queues
from tessera_cli.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from tessera_cli.engine.sequence import FinishReason, SampleError, Sequence, SequenceKey
from tessera_cli.engine.step_plan import Step, StepPlanner, release, withdraw
from tessera_cli.engine.step_undo import undo_step


class Scheduler:
    """Continuous batching over one block pool, without tensors.

    Attributes:
        config: its sizes and policies.
        queues: who waits and who runs.
        prefix_cache: what can be found of what was computed.
        block_pool: who holds which block.
        num_preemptions: sequences that lost their blocks so far.
        num_forks: children made so far.
        num_block_copies: shared blocks copied so far.
    """

    def __init__(self, config: EngineConfig, eos_token_ids: tuple[int, ...]) -> None:
        self.config = config
        self.queues = Queues()
        self.prefix_cache = PrefixCache(config.block_size)
        self.block_pool = BlockPool(config.num_blocks, self.prefix_cache, num_kept=config.num_kept_blocks)
        self.num_preemptions = 0
        self.num_forks = 0
        self.num_block_copies = 0
        self._eos_token_ids = frozenset(eos_token_ids)
        self._step: Step | None = None

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.queues.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold none: not yet admitted, or preempted."""
        return len(self.queues.waiting)

    def has_unfinished(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self.queues.requests)

    def check(self, sequence: Sequence) -> None:
        """Refuse what `check_request` refuses."""
        check_request(sequence, self.config, is_known=sequence.request_id in self.queues.requests)

    def add(self, sequence: Sequence) -> None:
        """Queue a new request behind all others of its priority, if `check` passes; allowed during a step."""
        self.check(sequence)
        self.queues.add(sequence)

    def abort(self, request_id: str) -> bool:
        """End all sequences of a request; False if none is live, or they are already being aborted.

        Outside a step their blocks are free at once. During a step they are only marked, because the step
        may be writing their blocks: `commit` or `rollback` ends them, and `commit` returns them with the
        finished.
        """
        sequences = [s for s in self.queues.requests.get(request_id, ()) if not s.aborted]
        for sequence in sequences:
            sequence.aborted = True
        if self._step is None:
            self._end_between_steps((sequence, FinishReason.ABORT) for sequence in sequences)
        else:
            self._step.aborted += sequences
        return bool(sequences)

    def finish(self, request_id: str, child_index: int, reason: FinishReason) -> Sequence | None:
        """End one sequence of a request for `reason`, between steps; None if there is no such sequence.

        Raises:
            RuntimeError: a step is outstanding, or the request has still to fork.
        """
        if self._step is not None:
            raise RuntimeError("a sequence is finished while a step is outstanding")
        for sequence in self.queues.requests.get(request_id, ()):
            if sequence.child_index == child_index:
                if sequence.num_pending_forks:
                    raise RuntimeError(f"request {request_id!r} is finished before it has forked")
                self._end_between_steps([(sequence, reason)])
                return sequence
        return None

    def reset_prefix_cache(self) -> None:
        """Let nothing that was computed before be found: neither what is cached, nor what runs on.

        A running sequence goes on with the blocks that it has.
        """
        self.block_pool.reset_prefix_cache()
        for sequence in self.queues.live():
            withdraw(sequence)

    def schedule(self) -> SchedulerOutput:
        """Choose the next step and take its blocks; empty only when nothing is unfinished.

        Raises:
            RuntimeError: the previous step was neither committed nor rolled back.
        """
        if self._step is not None:
            raise RuntimeError("the previous step was neither committed nor rolled back")
        self._step = step = Step(budget=self.config.max_num_batched_tokens)
        planner = StepPlanner(step, self.config, self.queues, self.block_pool, self.prefix_cache)
        output = planner.plan()
        self.num_preemptions += len(output.preempted)
        if not output.scheduled and self.queues.requests:
            raise RuntimeError(
                f"nothing can be scheduled and {len(self.queues.requests)} requests are unfinished"
            )
        return output

    def commit(
        self, output: SchedulerOutput, tokens: Mapping[SequenceKey, SequenceOf[int | SampleError]]
    ) -> list[Sequence]:
        """Take a step's results: for each sequence that samples, its tokens or the reason for their lack.

        A sequence that samples several forks, and its children get one each. Only now can others find the
        blocks that the step has filled; those of a sequence that ends with an error are forgotten.

        Returns:
            The sequences that this step ended, those aborted during it included; a token that was sampled for
            an aborted sequence is dropped.

        Raises:
            RuntimeError: `output` is not the outstanding step.
            ValueError: `tokens` are not those that the step samples; the step stays outstanding.
        """
        step = self._outstanding(output)
        for item, sampled in zip(output.scheduled, _match(output, tokens), strict=True):
            sequence, num_scheduled_tokens, start, num_samples = item
            sequence.num_computed_tokens = start + num_scheduled_tokens
            if sequence.aborted:
                continue
            self._publish(sequence, sampled)
            if num_samples == 1:
                self._append(step, sequence, sampled[0])
            elif num_samples:
                self._fork(step, item, sampled)
        self.num_block_copies += len(output.block_copies)
        self.num_forks += len(step.children)
        step.is_decided = True
        ended = step.ended + [(sequence, FinishReason.ABORT) for sequence in step.aborted]
        self._end(ended)
        self._step = None
        return [sequence for sequence, _ in ended]

    def rollback(self) -> None:
        """Undo a step that failed, or any other call that was interrupted; `undo_step` says how."""
        self.block_pool = undo_step(self._step, self.config, self.queues, self.prefix_cache)
        self._step = None

    def check_invariants(self) -> None:
        """Check what holds between any two calls; cheap enough to run after every step of a test.

        Raises:
            AssertionError: the books do not balance.
        """
        check_books(self.config, self.queues, self.block_pool)

    def _fork(self, step: Step, item: ScheduledSequence, sampled: SequenceOf[int | SampleError]) -> None:
        """Make the children of a sequence, in its blocks, and give each sequence its token."""
        sequence = item.sequence
        children = [sequence.fork(index) for index in range(1, item.num_samples)]
        step.children += children
        for child in children:
            self.block_pool.share(child.block_table)
        self.queues.add_children(sequence, children)
        sequence.num_pending_forks = 0
        for one, token in zip((sequence, *children), sampled, strict=True):
            self._append(step, one, token)

    def _append(self, step: Step, sequence: Sequence, token: int | SampleError) -> None:
        if isinstance(token, SampleError):
            sequence.error = token.message
            step.ended.append((sequence, FinishReason.ERROR))
            return
        sequence.token_ids.append(token)
        reason = sequence.reason_to_finish(self._eos_token_ids, self.config.max_model_len)
        if reason is not None:
            step.ended.append((sequence, reason))

    def _publish(self, sequence: Sequence, sampled: SequenceOf[int | SampleError]) -> None:
        """Let others find what `sequence` has computed, unless what it `sampled` casts doubt on it."""
        num_full = sequence.num_computed_tokens // self.config.block_size
        is_due = num_full > sequence.num_published_blocks and sequence.may_publish
        if is_due and not any(isinstance(token, SampleError) for token in sampled):
            self.prefix_cache.publish(sequence)

    def _end_between_steps(self, ended: Iterable[tuple[Sequence, FinishReason]]) -> None:
        """End sequences in a step of nothing else, so that a rollback ends those that an interrupt left."""
        self._step = step = Step(budget=0, ended=list(ended), is_decided=True)
        self._end(step.ended)
        self._step = None

    def _end(self, ended: Iterable[tuple[Sequence, FinishReason]]) -> None:
        """Free the blocks of sequences and forget them; what an error may have poisoned is not kept."""
        for sequence, reason in ended:
            if reason is FinishReason.ERROR:
                for block in sequence.block_table:
                    self.prefix_cache.forget(block)
            release(sequence, self.block_pool)
            self.queues.end(sequence, reason)
        self.queues.sweep()

    def _outstanding(self, output: SchedulerOutput) -> Step:
        if self._step is None or self._step.output is not output:
            raise RuntimeError("this step is not the outstanding one")
        return self._step


def _match(
    output: SchedulerOutput, tokens: Mapping[SequenceKey, SequenceOf[int | SampleError]]
) -> list[SequenceOf[int | SampleError]]:
    """The tokens of each scheduled sequence, none for those that sample none.

    Raises:
        ValueError: they are not those that the step samples.
    """
    sampled = [tokens.get(item.sequence.key, ()) for item in output.scheduled]
    counts = [item.num_samples for item in output.scheduled]
    if [len(some) for some in sampled] == counts and len(tokens) == len(counts) - counts.count(0):
        return sampled
    expected = {item.sequence.key: item.num_samples for item in output.scheduled if item.num_samples}
    found = {key: len(some) for key, some in tokens.items()}
    raise ValueError(f"the step samples {expected} tokens, and there came {found}")
