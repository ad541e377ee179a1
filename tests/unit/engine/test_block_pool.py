"""Every block is null, free or referenced, and the pool fails hard when someone miscounts."""

from collections import deque

import pytest

from tessera_cli.engine.block_pool import BlockPool, DoubleFree
from tessera_cli.errors import CapacityError


def test_all_blocks_but_the_null_block_are_handed_out_once() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert pool.num_free_blocks == 0
    pool.check_invariants([blocks])


def test_a_shortage_takes_nothing() -> None:
    pool = BlockPool(6)
    held = pool.allocate(2)
    with pytest.raises(CapacityError, match="4 KV blocks are needed and 3 are free"):
        pool.allocate(4)
    assert pool.num_free_blocks == 3
    pool.check_invariants([held])


def test_a_pool_without_usable_blocks_is_refused() -> None:
    with pytest.raises(CapacityError):
        BlockPool(1)


def test_a_shared_block_is_free_after_its_last_holder() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    pool.check_invariants([blocks, blocks])
    pool.free(blocks)
    assert pool.num_free_blocks == 1
    pool.check_invariants([blocks])
    pool.free(blocks)
    assert pool.num_free_blocks == 3
    pool.check_invariants([])


@pytest.mark.parametrize("tail", [[0], [3], [1, 1]], ids=["null", "free", "twice in one call"])
def test_freeing_what_nobody_holds_fails_hard(tail: list[int]) -> None:
    pool = BlockPool(4)
    assert pool.allocate(1) == [1]
    with pytest.raises(DoubleFree):
        pool.free(tail)


@pytest.mark.parametrize("block", [0, 3])
def test_sharing_what_nobody_holds_fails_hard(block: int) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match=f"block {block} is shared"):
        pool.share([block])


@pytest.mark.parametrize(
    "tables", [[], [[1]], [[1, 2], [1]], [[1, 2, 3]], [[0, 1, 2]]], ids=["all", "one", "more", "free", "null"]
)
def test_the_check_notices_tables_that_do_not_match(tables: list[list[int]]) -> None:
    pool = BlockPool(5)
    pool.check_invariants([pool.allocate(2)])
    with pytest.raises(AssertionError):
        pool.check_invariants(tables)


@pytest.mark.parametrize("free", [[3], [3, 4, 4], [3, 4, 1]], ids=["lost", "twice", "held"])
def test_the_check_notices_a_wrong_free_queue(free: list[int]) -> None:
    pool = BlockPool(5)
    held = pool.allocate(2)
    pool.check_invariants([held])
    pool._free_blocks = deque(free)
    with pytest.raises(AssertionError, match="in the free queue"):
        pool.check_invariants([held])
