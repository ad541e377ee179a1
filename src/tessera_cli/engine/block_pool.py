"""The one pool of KV blocks: who holds which, counted, so that none is leaked and none is freed twice."""

from collections import Counter, deque
from collections.abc import Iterable

from tessera_cli.errors import CapacityError

NULL_BLOCK = 0


class DoubleFree(RuntimeError):  # noqa: N818  (the name of the bug, as everyone calls it)
    """A block was freed that nobody holds: a bug in the engine, never a user's error."""


class BlockPool:
    """Reference counts over `num_blocks` physical blocks.

    Every block is in exactly one state: null (block 0, never handed out, kept zero so that padding may point
    to it), free, or referenced. A block's reference count is the number of block table entries that name it,
    at first those of `tables`.

    Raises:
        CapacityError: fewer than two blocks, so nothing to hand out.
    """

    def __init__(self, num_blocks: int, tables: Iterable[list[int]] = ()) -> None:
        if num_blocks < 2:
            raise CapacityError(
                f"a pool of {num_blocks} blocks has none to hand out", hint="use at least 2 blocks"
            )
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        for table in tables:
            for block in table:
                self._ref_counts[block] += 1
        free = (block for block, count in enumerate(self._ref_counts) if count == 0 and block != NULL_BLOCK)
        self._free_blocks = deque(free)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free_blocks)

    def ref_count(self, block: int) -> int:
        """Block table entries that name `block`."""
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` free blocks, each with one reference.

        Raises:
            CapacityError: fewer than `count` are free; nothing is taken.
        """
        if count > len(self._free_blocks):
            raise CapacityError(f"{count} KV blocks are needed and {len(self._free_blocks)} are free")
        blocks = [self._free_blocks.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, for another table that names them.

        A shared block is read-only: its next writer has to copy it first.

        Raises:
            RuntimeError: a block that nobody holds, whose contents therefore mean nothing.
        """
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise RuntimeError(f"block {block} is shared and nobody holds it")
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each of `blocks`; a block without references is free again.

        Raises:
            DoubleFree: a block that nobody holds.
        """
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise DoubleFree(f"block {block} is freed and nobody holds it")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free_blocks.append(block)

    def check_invariants(self, tables: Iterable[list[int]]) -> None:
        """Check that `tables`, which are all block tables there are, account for every block.

        Raises:
            AssertionError: a block is leaked, free and referenced at once, or miscounted.
        """
        entries = Counter(block for table in tables for block in table)
        free = Counter(self._free_blocks)
        for block in range(self.num_blocks):
            if self._ref_counts[block] != entries[block]:
                raise AssertionError(
                    f"block {block} counts {self._ref_counts[block]} references, tables have {entries[block]}"
                )
            expected_free = int(block != NULL_BLOCK and entries[block] == 0)
            if free[block] != expected_free:
                raise AssertionError(
                    f"block {block} with {entries[block]} references is {free[block]} times in the free queue"
                )
