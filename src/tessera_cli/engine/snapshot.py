"""The whole engine at one moment, for who watches it: every sequence and every block."""

import time
from dataclasses import dataclass, replace

from tessera_cli.engine.block_pool import BlockPool
from tessera_cli.engine.queues import Queues
from tessera_cli.engine.sequence import Sequence, SequenceKey, SequenceStatus
from tessera_cli.engine.stats import EngineStats, LatencyTotals


@dataclass(frozen=True, slots=True)
class SequenceSnapshot:
    """One live sequence.

    Attributes:
        key: request id and child index.
        status: waiting, running or preempted.
        num_prompt_tokens: tokens of the prompt.
        num_tokens: tokens of prompt and output.
        num_computed_tokens: so many of them have keys and values in the cache.
        block_table: the blocks that hold them, in the order of the text; none unless it runs.
    """

    key: SequenceKey
    status: SequenceStatus
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    block_table: tuple[int, ...]

    @classmethod
    def of(cls, sequence: Sequence) -> "SequenceSnapshot":
        """A copy of what `sequence` is now."""
        return cls(
            sequence.key,
            sequence.status,
            sequence.num_prompt_tokens,
            sequence.num_tokens,
            sequence.num_computed_tokens,
            tuple(sequence.block_table),
        )


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """An engine between two steps; it shares nothing with the engine, so any thread may read it.

    A block is free unless it is in a block table, which holds it, or among `cached_blocks`. As many tables
    hold it as it has references.

    Attributes:
        time: seconds on the monotonic clock.
        stats: what the engine counts.
        latencies: the times of all tokens so far; two snapshots give the means of what lies between them.
        sequences: the running, then the waiting, either in order of rank.
        cached_blocks: blocks that nobody holds and the prefix cache finds.
    """

    time: float
    stats: EngineStats
    latencies: LatencyTotals
    sequences: tuple[SequenceSnapshot, ...]
    cached_blocks: tuple[int, ...]


def take_snapshot(
    queues: Queues, pool: BlockPool, stats: EngineStats, latencies: LatencyTotals
) -> EngineSnapshot:
    """Copy what there is; on the engine's thread, between steps. It costs a copy of the block tables."""
    return EngineSnapshot(
        time.monotonic(),
        stats,
        replace(latencies),
        tuple(SequenceSnapshot.of(sequence) for sequence in (*queues.running, *queues.waiting)),
        pool.cached_blocks(),
    )
