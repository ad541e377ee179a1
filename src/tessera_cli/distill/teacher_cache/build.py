"""Opens the caches of a run, and writes first what they lack."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.distill.data.corpus import TrainBatch
from tessera_cli.distill.events import Listener, StageStarted
from tessera_cli.distill.teacher_cache.figures import CacheFigures
from tessera_cli.distill.teacher_cache.keys import batch_keys
from tessera_cli.distill.teacher_cache.layout import CacheDirectory
from tessera_cli.distill.teacher_cache.plan import CachePlan
from tessera_cli.distill.teacher_cache.reader import CacheReader
from tessera_cli.distill.teacher_cache.writer import write_cache
from tessera_cli.models.decoder import Decoder


@dataclass(frozen=True, eq=False)
class OpenCache:
    """A cache that holds all documents of its plan."""

    plan: CachePlan
    reader: CacheReader

    @property
    def figures(self) -> CacheFigures:
        """What it costs and holds, as far as it was written."""
        return CacheFigures.of(self.plan.split, self.plan.path, self.reader.records)

    def hidden_states(self, batches: Sequence[TrainBatch]) -> list[Tensor]:
        """The teacher's hidden states of each batch [targets, hidden], on the CPU; a cache that has them."""
        return [
            torch.cat([part["hidden"] for part in self.reader.read(batch_keys(batch))]) for batch in batches
        ]


def open_caches(
    plans: Sequence[CachePlan], load_teacher: Callable[[], Decoder], listener: Listener
) -> list[OpenCache]:
    """The caches of `plans`, complete; `load_teacher` is called only if one of them is not.

    Raises:
        UsageError: a directory is something else, or being written by another process.
        DataError: a shard is damaged.
        RunError: the file system refuses.
        KeyboardInterrupt: the user stopped it; what is complete is kept.
    """
    found = {plan.split: _open(plan) for plan in plans}
    missing = [plan for plan in plans if found[plan.split] is None]
    if missing:
        listener(StageStarted("cache"))
        teacher = load_teacher()
        for plan in missing:
            write_cache(plan, teacher, listener)
            found[plan.split] = _open(plan)
    complete = [cache for cache in found.values() if cache is not None]
    if len(complete) != len(plans):
        raise ValueError("a cache that was just written lacks documents of its plan")
    return complete


def _open(plan: CachePlan) -> OpenCache | None:
    """The cache of `plan`, or None where it lacks documents."""
    reader = CacheReader(CacheDirectory(plan.path, plan.fingerprints), plan.codec)
    return OpenCache(plan, reader) if reader.holds(plan.keys) else None
