"""From snapshots of an engine to the events of the live view: what changed, in as few numbers as will do."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from tessera_cli.engine.sequence import SequenceKey, SequenceStatus
from tessera_cli.engine.snapshot import EngineSnapshot, SequenceSnapshot
from tessera_cli.engine.stats import LatencyTotals

FREE = 0
CACHED = -1
# A table of more would be read by nobody; the counts have them all.
MAX_SEQUENCES = 50
# Steps of a slow engine come seldom: from one event to the next there is one, or none.
_RATE_WINDOW = 2.0  # seconds
# What is random in a long request id is at its end.
_SHORT_ID = 12

Tile = tuple[int, int, int, int]
"""So many blocks in a row are alike: the first, how many, their owner, their references."""


@dataclass(frozen=True, slots=True)
class LiveSequence:
    """One sequence as the page lists it; `request` is the end of its request's id.

    `owner` is its number in this stream of events: above 0, and nobody else's ever.
    """

    owner: int
    request: str
    sample: int
    status: str
    num_prompt_tokens: int
    num_computed_tokens: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class LiveEvent:
    """The engine at one moment, against the event before; before the first one every block is free.

    Attributes:
        num_blocks: usable KV blocks, which are blocks 1 to `num_blocks`, of `block_size` tokens.
        num_used_blocks: those that sequences hold.
        num_cached_blocks: those that nobody holds and the prefix cache finds.
        tiles: the blocks that have changed. The owner is FREE, CACHED or the number of a sequence: of those
            that share the block, the one of best rank.
        sequences: the first `MAX_SEQUENCES`, the running before the waiting, best rank first.
        num_running: sequences that hold blocks.
        num_waiting: those that have never run.
        num_preempted: those that have lost their blocks and wait to get them back.
        num_preemptions: how often that has happened since the engine was made.
        tokens_per_second: sampled tokens over the last two seconds, or since the first event; None in it.
        ttft: mean seconds to the first token, of the samples that got it since the event before; None
            without any.
        tpot: mean seconds from one token to the next, of all later tokens since then; None without any.
    """

    num_blocks: int
    block_size: int
    num_used_blocks: int
    num_cached_blocks: int
    tiles: list[Tile]
    sequences: list[LiveSequence]
    num_running: int
    num_waiting: int
    num_preempted: int
    num_preemptions: int
    tokens_per_second: float | None
    ttft: float | None
    tpot: float | None


class LiveEncoder:
    """Makes the events of one stream."""

    def __init__(self) -> None:
        self._before: EngineSnapshot | None = None
        self._tiles: NDArray[np.int64] | None = None
        self._owners: dict[SequenceKey, int] = {}
        self._numbers = count(1)
        self._counts: deque[tuple[float, int]] = deque()

    def encode(self, snapshot: EngineSnapshot) -> LiveEvent:
        """The event that follows those of the snapshots before, all of one engine."""
        before, self._before = self._before, snapshot
        # Whoever is gone is forgotten: an id may come back for another request.
        self._owners = {
            one.key: self._owners.get(one.key) or next(self._numbers) for one in snapshot.sequences
        }
        statuses = Counter(one.status for one in snapshot.sequences)
        stats = snapshot.stats
        ttft = tpot = None
        if before is not None:
            ttft, tpot = _latencies(before.latencies, snapshot.latencies)
        return LiveEvent(
            stats.num_blocks,
            stats.block_size,
            stats.num_used_blocks,
            stats.num_cached_blocks,
            self._changes(snapshot),
            [self._row(one) for one in snapshot.sequences[:MAX_SEQUENCES]],
            statuses[SequenceStatus.RUNNING],
            statuses[SequenceStatus.WAITING],
            statuses[SequenceStatus.PREEMPTED],
            stats.num_preemptions,
            self._rate(snapshot),
            ttft,
            tpot,
        )

    def _rate(self, snapshot: EngineSnapshot) -> float | None:
        now, num_tokens = snapshot.time, snapshot.stats.generation_tokens
        self._counts.append((now, num_tokens))
        while self._counts[0][0] < now - _RATE_WINDOW:
            self._counts.popleft()
        start, num_before = self._counts[0]
        return _mean(num_tokens - num_before, now - start)

    def _row(self, one: SequenceSnapshot) -> LiveSequence:
        request_id, sample = one.key
        return LiveSequence(
            self._owners[one.key],
            request_id[-_SHORT_ID:],
            sample,
            one.status.name.lower(),
            one.num_prompt_tokens,
            one.num_computed_tokens,
            one.num_tokens,
            len(one.block_table),
        )

    def _changes(self, snapshot: EngineSnapshot) -> list[Tile]:
        size = snapshot.stats.num_blocks + 1  # block 0, the null block, is always free
        before = np.zeros((2, size), np.int64) if self._tiles is None else self._tiles
        self._tiles = _tiles(snapshot, self._owners, size)
        changed = np.flatnonzero((self._tiles != before).any(axis=0))
        return _runs(changed, self._tiles[:, changed])


def _tiles(snapshot: EngineSnapshot, owners: dict[SequenceKey, int], size: int) -> NDArray[np.int64]:
    """Owner and references of each block: (2, size)."""
    tiles = np.zeros((2, size), np.int64)
    tiles[0, np.fromiter(snapshot.cached_blocks, np.int64, len(snapshot.cached_blocks))] = CACHED
    for one in reversed(snapshot.sequences):  # the best rank last, so that its number stays
        table = np.fromiter(one.block_table, np.int64, len(one.block_table))
        tiles[0, table] = owners[one.key]
        tiles[1, table] += 1  # a table names no block twice
    return tiles


def _runs(blocks: NDArray[np.int64], tiles: NDArray[np.int64]) -> list[Tile]:
    """`blocks`, ascending, whose owners and references are `tiles`, as runs of those that are alike."""
    if not len(blocks):
        return []
    ends = (np.diff(blocks) != 1) | (np.diff(tiles) != 0).any(axis=0)
    starts = np.concatenate(([0], np.flatnonzero(ends) + 1))
    lengths = np.diff(starts, append=len(blocks))
    columns = (blocks[starts], lengths, *tiles[:, starts])
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _latencies(before: LatencyTotals, now: LatencyTotals) -> Sequence[float | None]:
    return (
        _mean(now.ttft - before.ttft, now.num_first_tokens - before.num_first_tokens),
        _mean(now.itl - before.itl, now.num_later_tokens - before.num_later_tokens),
    )


def _mean(total: float, number: float) -> float | None:
    return total / number if number else None
