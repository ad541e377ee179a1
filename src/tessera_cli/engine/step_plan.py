"""The making of one step: who runs, with how many tokens and which blocks, and who gives way.

All sequences, running and waiting, are walked in one order: (priority, arrival, child index), where "fcfs"
has a single priority. A running sequence takes its blocks from the worst running ones where they run short.
The head of the waiting is admitted where blocks, slots and budget are left, or where worse ones that run
can give them up; if not, nobody behind it is: small requests wait behind a large head, which is what bounds
the head's own wait.

Whoever is preempted is worse than everyone in the step, so nothing that the step has taken is taken back.
It is not admitted again in the same step.
"""

from dataclasses import dataclass, field

from tessera_cli.engine.block_pool import BlockPool
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.prefix_cache import PrefixCache, PublishedBlock
from tessera_cli.engine.queues import Queues
from tessera_cli.engine.scheduler_output import BlockCopy, ScheduledSequence, SchedulerOutput
from tessera_cli.engine.sequence import FinishReason, Sequence, SequenceStatus


@dataclass
class Step:
    """A step from `schedule` to `commit` or `rollback`.

    Attributes:
        budget: tokens that it may still schedule.
        admitted: the sequences that started in it.
        copied: those that were given a copy of a block.
        output: the finished plan.
        children: the sequences that its commit made.
        ended: the sequences that its commit ends, with their reasons.
        is_decided: the commit stands; what is left of it is carried out, not undone.
        aborted: the sequences that were aborted during it.
    """

    budget: int
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    block_copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    copied: list[Sequence] = field(default_factory=list)
    output: SchedulerOutput | None = None
    children: list[Sequence] = field(default_factory=list)
    ended: list[tuple[Sequence, FinishReason]] = field(default_factory=list)
    is_decided: bool = False
    aborted: list[Sequence] = field(default_factory=list)


class StepPlanner:
    """Fills one `Step`. In `queues.running`, those before `_index` are in the step already."""

    def __init__(
        self, step: Step, config: EngineConfig, queues: Queues, pool: BlockPool, prefix_cache: PrefixCache
    ) -> None:
        self._step = step
        self._config = config
        self._block_size = config.block_size
        self._queues = queues
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._index = 0
        # Who will fork needs the places of its children from the start.
        self._num_free_slots = config.max_num_slots - sum(_num_slots(s) for s in queues.running)

    def plan(self) -> SchedulerOutput:
        """Walk the sequences, best rank first."""
        running, waiting, step = self._queues.running, self._queues.waiting, self._step
        admits = True
        while True:
            if (
                admits
                and waiting
                and (self._index == len(running) or waiting[0].rank < running[self._index].rank)
            ):
                admits = self._admit(waiting[0])
            elif self._index < len(running):
                self._continue(running[self._index])
            else:
                break
        num_scheduled_tokens = self._config.max_num_batched_tokens - step.budget
        step.output = SchedulerOutput(
            tuple(step.scheduled), tuple(step.preempted), tuple(step.block_copies), num_scheduled_tokens
        )
        return step.output

    def _continue(self, sequence: Sequence) -> None:
        """Let a running sequence go on; if it is itself the worst and blocks are short, it is preempted."""
        while True:
            num_missing, shares = self._needed_blocks(sequence)
            count = num_missing + shares
            if count == 0 or count <= self._pool.num_free_blocks:
                self._take(sequence, num_missing, shares)
                return
            if self._preempt_worst() is sequence:
                return

    def _admit(self, sequence: Sequence) -> bool:
        """Let the head of the waiting run, if it can; False keeps everyone behind it waiting."""
        if sequence in self._step.preempted:
            return False
        found: list[PublishedBlock] = []
        if self._reads_cache(sequence):
            found = self._prefix_cache.find(sequence)
        # All blocks of the present tokens are reserved before the first chunk runs: a prefill in progress
        # never asks for more.
        num_new_blocks = self._config.blocks_for(sequence.num_tokens) - len(found)
        num_tokens = 1
        if not self._config.enable_chunked_prefill:
            num_tokens = sequence.num_tokens - len(found) * self._block_size
        elif self._allowance() < 1 and self._num_free_slots >= _num_slots(sequence):
            return False  # the next step has a new budget; nobody has to give way for it

        def fits(num_free_blocks: int, num_idle: int, num_free_slots: int, allowance: int) -> bool:
            return (
                num_free_blocks - num_idle >= num_new_blocks
                and num_free_slots >= _num_slots(sequence)
                and allowance >= num_tokens
            )

        def fits_now() -> bool:
            num_idle = sum(self._pool.ref_count(entry.block) == 0 for entry in found)
            return fits(self._pool.num_free_blocks, num_idle, self._num_free_slots, self._allowance())

        if not fits_now():
            worse = self._queues.running[self._index :]
            freed = self._pool.freed_by(s.block_table for s in worse)
            num_free_blocks = self._pool.num_free_blocks + len(freed)
            num_idle = sum(self._pool.ref_count(entry.block) == 0 or entry.block in freed for entry in found)
            num_free_slots = self._num_free_slots + sum(_num_slots(s) for s in worse)
            if not worse or not fits(num_free_blocks, num_idle, num_free_slots, self._step.budget):
                return False
            while not fits_now():
                self._preempt_worst()
        self._start(sequence, found)
        return True

    def _reads_cache(self, sequence: Sequence) -> bool:
        """Who wants the log-probabilities of the whole prompt needs every position computed."""
        params = sequence.params
        wants_all = params.prompt_logprobs is not None and params.prompt_logprobs_start <= 1
        return self._config.enable_prefix_caching and not wants_all

    def _start(self, sequence: Sequence, found: list[PublishedBlock]) -> None:
        """Run the head of the waiting from behind the blocks that the prefix cache has found."""
        if self._reads_cache(sequence) and sequence.status is SequenceStatus.WAITING:
            self._prefix_cache.num_queries += sequence.num_tokens
            self._prefix_cache.num_hits += len(found) * self._block_size
        self._step.admitted.append(sequence)
        blocks = [entry.block for entry in found]
        self._pool.share(blocks)
        sequence.block_table += blocks
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(blocks) * self._block_size
        sequence.num_published_blocks = len(found)
        sequence.last_published = found[-1] if found else None
        sequence.may_publish = self._config.enable_prefix_caching
        self._queues.admit_head(self._index)
        self._num_free_slots -= _num_slots(sequence)
        self._take(sequence, *self._needed_blocks(sequence))

    def _take(self, sequence: Sequence, num_missing: int, shares: bool) -> None:
        """Enter `sequence` into the step with its blocks and as many tokens as the budget allows."""
        start, num_tokens = sequence.num_computed_tokens, len(sequence.token_ids)
        if shares:
            self._copy_block(sequence, start // self._block_size)
        if num_missing:
            sequence.block_table += self._pool.allocate(num_missing)
        self._index += 1
        step = self._step
        count = min(num_tokens - start, step.budget - len(self._queues.running) + self._index)
        num_samples = 1 + sequence.num_pending_forks if start + count == num_tokens else 0
        step.scheduled.append(ScheduledSequence(sequence, count, start, num_samples))
        step.budget -= count

    def _allowance(self) -> int:
        """Tokens left if each of the running that are not in the step yet gets one."""
        return self._step.budget - (len(self._queues.running) - self._index)

    def _needed_blocks(self, sequence: Sequence) -> tuple[int, bool]:
        """Blocks that its table lacks, and whether it would write into a block that others hold too.

        That can only be the block of the first token to compute: what is found in the cache is full and
        computed, and a fork shares no more than is computed.
        """
        table = sequence.block_table
        first = sequence.num_computed_tokens // self._block_size
        shares = first < len(table) and self._pool.ref_count(table[first]) > 1
        return -(-len(sequence.token_ids) // self._block_size) - len(table), shares

    def _copy_block(self, sequence: Sequence, index: int) -> None:
        """Give `sequence` a block of its own in place of a shared one; the runner fills it."""
        source = sequence.block_table[index]
        self._step.copied.append(sequence)  # first: a rollback must not trust a block that was never filled
        (target,) = self._pool.allocate(1)
        sequence.block_table[index] = target
        self._pool.free([source])
        self._step.block_copies.append(BlockCopy(source, target))

    def _preempt_worst(self) -> Sequence:
        """Evict the newest, restart the cheapest: it starts again from what is still cached of it."""
        sequence = self._queues.preempt_worst()
        self._num_free_slots += _num_slots(sequence)
        release(sequence, self._pool)
        self._step.preempted.append(sequence)
        return sequence


def release(sequence: Sequence, pool: BlockPool) -> None:
    """Take all blocks from a sequence, which has then computed nothing."""
    pool.free(reversed(sequence.block_table))
    restart(sequence)


def restart(sequence: Sequence) -> None:
    """Let a sequence begin again, without blocks."""
    sequence.block_table.clear()
    sequence.num_computed_tokens = 0
    withdraw(sequence)


def withdraw(sequence: Sequence) -> None:
    """Let a sequence have no part in the prefix cache until it is admitted again."""
    sequence.may_publish = False
    sequence.num_published_blocks = 0
    sequence.last_published = None


def _num_slots(sequence: Sequence) -> int:
    return 1 + sequence.num_pending_forks
