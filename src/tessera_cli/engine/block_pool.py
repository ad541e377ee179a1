"""The one pool of KV blocks: who holds which, counted, so that none is leaked and none is freed twice."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from tessera_cli.engine.prefix_cache import PrefixCache
from tessera_cli.errors import CapacityError

NULL_BLOCK = 0


class DoubleFree(RuntimeError):  # noqa: N818  (the name of the bug, as everyone calls it)
    """A block was freed that nobody holds: a bug in the engine, never a user's error."""


class BlockPool:
    """Reference counts over `num_blocks` physical blocks.

    Every block is in exactly one state: null (block 0, never handed out, kept zero so that padding may point
    to it), free, cached (free, but the prefix cache finds it), or referenced. A block's reference count is
    the number of block table entries that name it, at first those of `tables`.

    Free blocks are handed out before cached ones are, and of these the one that was freed longest ago. But
    memory that was never used is left alone while more than `num_kept` blocks are cached: they are handed out
    before it. That number grows by each block that the prefix cache is asked for after it was evicted, so
    that the pool takes the memory of what runs, and for the past only as much as is of use.

    Args:
        num_blocks: the null block among them.
        prefix_cache: finds the published ones.
        num_kept: as told above; None is all.
        tables: block tables that hold blocks at first.

    Attributes:
        num_used_ever: blocks from this number on count as never used: nobody has held them since the pool was
            made or reset.

    Raises:
        CapacityError: fewer than two blocks, so nothing to hand out.
    """

    def __init__(
        self,
        num_blocks: int,
        prefix_cache: PrefixCache,
        *,
        num_kept: int | None = None,
        tables: Iterable[list[int]] = (),
    ) -> None:
        if num_blocks < 2:
            raise CapacityError(
                f"a pool of {num_blocks} blocks has none to hand out", hint="use at least 2 blocks"
            )
        self.num_blocks = num_blocks
        self._prefix_cache = prefix_cache
        self._num_kept = num_blocks if num_kept is None else num_kept
        self._ref_counts = [0] * num_blocks
        for table in tables:
            for block in table:
                self._ref_counts[block] += 1
        # The last one is handed out first: a block that was just in use before one that never was.
        self._free_blocks = [
            block for block in range(num_blocks - 1, NULL_BLOCK, -1) if self._ref_counts[block] == 0
        ]
        self._cached_blocks: OrderedDict[int, None] = OrderedDict()
        self.num_used_ever = self._end_of_held()

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, the cached ones among them."""
        return len(self._free_blocks) + len(self._cached_blocks)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and the prefix cache finds."""
        return len(self._cached_blocks)

    def cached_blocks(self) -> tuple[int, ...]:
        """These blocks, the next to be evicted first."""
        return tuple(self._cached_blocks)

    def ref_count(self, block: int) -> int:
        """Block table entries that name `block`."""
        return self._ref_counts[block]

    def freed_by(self, tables: Iterable[list[int]]) -> set[int]:
        """The blocks that nobody would hold any more if all of `tables` were freed."""
        entries = Counter(block for table in tables for block in table)
        return {block for block, count in entries.items() if self._ref_counts[block] == count}

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, each with one reference; the cached ones among them are forgotten.

        Raises:
            CapacityError: fewer than `count` are free; nothing is taken.
        """
        if count > self.num_free_blocks:
            raise CapacityError(f"{count} KV blocks are needed and {self.num_free_blocks} are free")
        blocks = []
        for _ in range(count):
            if self._evicts():
                block, _ = self._cached_blocks.popitem(last=False)
                self._prefix_cache.evict(block, num_remembered=self.num_blocks)
            else:
                block = self._free_blocks.pop()
                self.num_used_ever = max(self.num_used_ever, block + 1)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def _evicts(self) -> bool:
        """Whether the next block to hand out is a cached one; there is one, or one that is free."""
        if self._free_blocks and self._free_blocks[-1] < self.num_used_ever:
            return False
        num_kept = self._num_kept + self._prefix_cache.num_missed
        return not self._free_blocks or len(self._cached_blocks) > num_kept

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, for another table that names them.

        A shared block is read-only: its next writer has to copy it first.

        Raises:
            RuntimeError: a block that nobody holds and that is not cached, whose contents mean nothing.
        """
        for block in blocks:
            if self._ref_counts[block] == 0:
                if block not in self._cached_blocks:
                    raise RuntimeError(f"block {block} is shared and nobody holds it")
                del self._cached_blocks[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference from each of `blocks`; a block without references is free again, or cached.

        Give a table's last block first: of a cached prefix the end is then evicted before what leads to it.

        Raises:
            DoubleFree: a block that nobody holds.
        """
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise DoubleFree(f"block {block} is freed and nobody holds it")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._prefix_cache:
                    self._cached_blocks[block] = None
                else:
                    self._free_blocks.append(block)

    def reset_prefix_cache(self) -> None:
        """Forget all that is published, and what was of use: as in a new pool that holds what is held now."""
        self._prefix_cache.clear()
        self._free_blocks = sorted([*self._free_blocks, *self._cached_blocks], reverse=True)
        self._cached_blocks.clear()
        self.num_used_ever = self._end_of_held()

    def _end_of_held(self) -> int:
        """The number after that of the last block with references."""
        return 1 + max((block for block, count in enumerate(self._ref_counts) if count), default=NULL_BLOCK)

    def check_invariants(self, tables: Iterable[list[int]]) -> None:
        """Check that `tables`, which are all block tables there are, account for every block.

        Raises:
            AssertionError: a block is leaked, in two states at once, miscounted, or cached and not found.
        """
        self._prefix_cache.check_invariants()
        entries = Counter(block for table in tables for block in table)
        free = Counter(self._free_blocks)
        for block in range(self.num_blocks):
            if self._ref_counts[block] != entries[block]:
                raise AssertionError(
                    f"block {block} counts {self._ref_counts[block]} references, tables have {entries[block]}"
                )
            times = free[block] + (block in self._cached_blocks)
            if times != int(block != NULL_BLOCK and entries[block] == 0):
                raise AssertionError(
                    f"block {block} with {entries[block]} references is {times} times in the free queue"
                )
            is_findable = block in self._prefix_cache
            if block in self._cached_blocks and not is_findable:
                raise AssertionError(f"block {block} is cached and the prefix cache does not know it")
            if is_findable and (block == NULL_BLOCK or free[block]):
                raise AssertionError(f"block {block} is in the prefix cache and holds nothing")
            if block >= self.num_used_ever and not free[block]:
                raise AssertionError(f"block {block} is in use and counts as never used")
