"""Every block is null, free, cached or referenced, and the pool fails hard when someone miscounts."""

from collections.abc import Iterable

import pytest

from tessera_cli.engine.block_pool import BlockPool, DoubleFree
from tessera_cli.engine.prefix_cache import PrefixCache
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import Sequence
from tessera_cli.errors import CapacityError

BLOCK_SIZE = 2


def make_pool(num_blocks: int, *, num_kept: int | None = None) -> BlockPool:
    return BlockPool(num_blocks, PrefixCache(BLOCK_SIZE), num_kept=num_kept)


def publish(pool: BlockPool, blocks: list[int], *, first_token: int = 1) -> Sequence:
    """A sequence that has computed and published all of `blocks`."""
    sequence = Sequence("a", range(first_token, first_token + BLOCK_SIZE * len(blocks)), SamplingParams())
    sequence.block_table = blocks
    sequence.num_computed_tokens = sequence.num_tokens
    pool._prefix_cache.publish(sequence)
    return sequence


def test_all_blocks_but_the_null_block_are_handed_out_once() -> None:
    pool = make_pool(6)
    blocks = pool.allocate(5)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert pool.num_free_blocks == 0
    pool.check_invariants([blocks])


def test_a_shortage_takes_nothing() -> None:
    pool = make_pool(6)
    held = pool.allocate(2)
    with pytest.raises(CapacityError, match="4 KV blocks are needed and 3 are free"):
        pool.allocate(4)
    assert pool.num_free_blocks == 3
    pool.check_invariants([held])


def test_a_pool_without_usable_blocks_is_refused() -> None:
    with pytest.raises(CapacityError):
        make_pool(1)


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = make_pool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.check_invariants([blocks, blocks])
    assert pool.freed_by([blocks]) == set()
    assert pool.freed_by([blocks, blocks]) == set(blocks)
    pool.free(blocks)
    assert pool.num_free_blocks == 1
    pool.check_invariants([blocks])
    pool.free(blocks)
    assert pool.num_free_blocks == 3
    pool.check_invariants([])


def test_published_blocks_are_cached_when_nobody_holds_them_and_can_be_taken_up_again() -> None:
    pool = make_pool(4)
    blocks = pool.allocate(2)
    sequence = publish(pool, blocks)
    assert pool.num_cached_blocks == 0
    pool.free(reversed(blocks))
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (2, 3)
    pool.check_invariants([])
    sequence.token_ids.append(99)
    found = [entry.block for entry in pool._prefix_cache.find(sequence)]
    pool.share(found)
    assert (found, pool.num_cached_blocks, pool.num_free_blocks) == (blocks, 0, 1)
    pool.check_invariants([found])


def test_unpublished_blocks_are_handed_out_first_and_then_the_cached_ones_that_were_freed_first() -> None:
    pool = make_pool(6)
    old, new, private = pool.allocate(2), pool.allocate(2), pool.allocate(1)
    publish(pool, old, first_token=1)
    publish(pool, new, first_token=51)
    for table in (old, new, private):
        pool.free(reversed(table))
    # Of a prefix its end goes before what leads to it.
    assert [pool.allocate(1) for _ in range(5)] == [private, [old[1]], [old[0]], [new[1]], [new[0]]]


def run_one(
    pool: BlockPool, first_token: int, num_blocks: int = 2, *, tables: Iterable[list[int]] = ()
) -> Sequence:
    """What a sequence of its own text does: it computes, publishes and ends; returned with a token more."""
    blocks = pool.allocate(num_blocks)
    sequence = publish(pool, blocks, first_token=first_token)
    pool.free(reversed(blocks))
    pool.check_invariants(tables)
    sequence.token_ids.append(99)
    return sequence


def find(pool: BlockPool, sequence: Sequence) -> list[int]:
    return [entry.block for entry in pool._prefix_cache.find(sequence)]


@pytest.mark.parametrize(("num_kept", "num_used"), [(0, 2), (1, 3), (2, 4), (3, 5), (6, 8), (None, 20)])
def test_memory_that_was_never_used_is_left_alone_while_more_than_is_kept_is_cached(
    num_kept: int | None, num_used: int
) -> None:
    pool = make_pool(100, num_kept=num_kept)
    last = [run_one(pool, first_token) for first_token in range(0, 1000, 100)][-1]
    assert pool.num_used_ever == 1 + num_used
    assert pool.num_cached_blocks == num_used
    assert len(find(pool, last)) == 2


def test_what_runs_takes_all_memory_there_is_before_anything_is_refused() -> None:
    pool = make_pool(9, num_kept=0)
    run_one(pool, 1)
    assert len(pool.allocate(8)) == 8
    assert (pool.num_cached_blocks, pool.num_used_ever) == (0, 9)


def test_more_is_kept_once_what_was_evicted_is_asked_for() -> None:
    pool = make_pool(100, num_kept=2)
    texts = range(0, 500, 100)
    sequences = [run_one(pool, first_token) for first_token in texts]
    assert pool.num_used_ever == 5
    for _ in range(2):  # a sequence that waits looks again
        assert find(pool, sequences[0]) == []
    assert pool._prefix_cache.num_missed == 2
    for first_token in texts[:-2]:
        find(pool, run_one(pool, first_token))
    # By now all five texts are kept, in as much memory.
    assert [len(find(pool, run_one(pool, first_token))) for first_token in texts] == [2] * 5
    for _ in range(3):
        for sequence in sequences:
            find(pool, sequence)
    assert pool.num_used_ever <= 1 + 10 + 2


def test_no_more_evictions_are_remembered_than_the_pool_has_blocks() -> None:
    pool = make_pool(5, num_kept=0)
    sequences = [run_one(pool, first_token) for first_token in range(0, 1000, 100)]
    assert len(pool._prefix_cache._evicted) == 5
    find(pool, sequences[0])
    assert pool._prefix_cache.num_missed == 0
    pool.reset_prefix_cache()
    find(pool, sequences[-2])
    assert pool._prefix_cache.num_missed == 0


def test_what_is_evicted_again_is_remembered_as_evicted_last() -> None:
    pool = make_pool(5, num_kept=0)
    first = run_one(pool, 0)
    run_one(pool, 100)
    run_one(pool, 0)  # again, without being looked for
    run_one(pool, 200)
    run_one(pool, 300)
    run_one(pool, 400)
    assert find(pool, first) == []
    assert pool._prefix_cache.num_missed == 1  # its beginning; 200 and 300 are the other four


@pytest.mark.parametrize("num_held", [0, 3])
def test_after_a_reset_a_pool_keeps_what_a_new_one_keeps(num_held: int) -> None:
    def hits(pool: BlockPool) -> list[int]:
        """Of each text in turn, the blocks that are found of it before it runs again."""
        found = []
        for first_token in (0, 100, 200, 0, 100, 300, 200, 100, 0, 200):
            text = Sequence("a", [*range(first_token, first_token + 4), 99], SamplingParams())
            found.append(len(find(pool, text)))
            run_one(pool, first_token, tables=[held])
        return found

    pool = make_pool(50, num_kept=3)
    held = pool.allocate(num_held)
    expected, num_used = hits(pool), pool.num_used_ever
    assert sum(expected) > 0
    assert hits(pool) != expected
    for _ in range(2):
        pool.reset_prefix_cache()
        pool.check_invariants([held])
        assert hits(pool) == expected
        assert pool.num_used_ever == num_used


def test_what_is_evicted_is_forgotten() -> None:
    pool = make_pool(4)
    blocks = pool.allocate(3)
    sequence = publish(pool, blocks)
    pool.free(reversed(blocks))
    taken = pool.allocate(2)
    sequence.token_ids.append(99)
    assert [entry.block for entry in pool._prefix_cache.find(sequence)] == blocks[:1]
    pool.check_invariants([taken])


def test_a_reset_leaves_plain_free_blocks() -> None:
    pool = make_pool(6)
    cached, held = pool.allocate(2), pool.allocate(2)
    publish(pool, cached)
    publish(pool, held, first_token=51)
    pool.free(reversed(cached))
    pool.reset_prefix_cache()
    assert (pool.num_cached_blocks, pool.num_free_blocks, len(pool._prefix_cache)) == (0, 3, 0)
    pool.check_invariants([held])
    pool.free(reversed(held))
    assert pool.num_cached_blocks == 0
    pool.check_invariants([])


@pytest.mark.parametrize("tail", [[0], [3], [1, 1]], ids=["null", "free", "twice in one call"])
def test_freeing_what_nobody_holds_fails_hard(tail: list[int]) -> None:
    pool = make_pool(4)
    assert pool.allocate(1) == [1]
    with pytest.raises(DoubleFree):
        pool.free(tail)


@pytest.mark.parametrize("block", [0, 3])
def test_sharing_what_nobody_holds_fails_hard(block: int) -> None:
    pool = make_pool(4)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match=f"block {block} is shared"):
        pool.share([block])


@pytest.mark.parametrize(
    "tables", [[], [[1]], [[1, 2], [1]], [[1, 2, 3]], [[0, 1, 2]]], ids=["all", "one", "more", "free", "null"]
)
def test_the_check_notices_tables_that_do_not_match(tables: list[list[int]]) -> None:
    pool = make_pool(5)
    pool.check_invariants([pool.allocate(2)])
    with pytest.raises(AssertionError):
        pool.check_invariants(tables)


@pytest.mark.parametrize("free", [[3], [3, 4, 4], [3, 4, 1]], ids=["lost", "twice", "held"])
def test_the_check_notices_a_wrong_free_queue(free: list[int]) -> None:
    pool = make_pool(5)
    held = pool.allocate(2)
    pool.check_invariants([held])
    pool._free_blocks = free
    with pytest.raises(AssertionError, match="in the free queue"):
        pool.check_invariants([held])


def test_the_check_notices_a_block_in_two_states() -> None:
    pool = make_pool(5)
    blocks = pool.allocate(2)
    publish(pool, blocks)
    pool.free(reversed(blocks))
    pool._prefix_cache.forget(blocks[0])
    with pytest.raises(AssertionError, match="does not know it"):
        pool.check_invariants([])
    pool.reset_prefix_cache()
    publish(pool, [3])
    with pytest.raises(AssertionError, match="holds nothing"):
        pool.check_invariants([])


def test_the_check_notices_a_used_block_that_counts_as_never_used() -> None:
    pool = make_pool(5)
    held = pool.allocate(2)
    pool.num_used_ever = 2
    with pytest.raises(AssertionError, match="block 2 is in use and counts as never used"):
        pool.check_invariants([held])
