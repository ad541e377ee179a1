"""Whether a cache still says what the teacher says."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tessera_cli.distill.events import Listener, Note
from tessera_cli.distill.teacher_cache.layout import CacheDirectory, file_sha256
from tessera_cli.distill.teacher_cache.plan import CachePlan, PlannedShard
from tessera_cli.distill.teacher_cache.reader import CacheReader
from tessera_cli.distill.teacher_cache.writer import encode_shard
from tessera_cli.errors import DataError
from tessera_cli.models.decoder import Decoder

# Shards whose first micro-batch the teacher computes again.
RECOMPUTED_SHARDS = 4


@dataclass(frozen=True)
class Verification:
    """Documents that the teacher computed again, and how many of them came out the same in every bit.

    Another machine, or another number of threads, rounds differently: then none need be equal.
    """

    num_recomputed: int
    num_equal: int


def require_complete(plans: Iterable[CachePlan]) -> None:
    """See that there is something whole to verify.

    Raises:
        UsageError: a directory is another cache.
        DataError: documents are missing, or a shard is damaged.
    """
    for plan in plans:
        if not CacheReader(CacheDirectory(plan.path, plan.fingerprints), plan.codec).holds(plan.keys):
            raise DataError(f"{plan.path} is not complete", hint="leave --verify out to complete it")


def verify_cache(plan: CachePlan, teacher: Decoder, listener: Listener) -> Verification:
    """Read every byte of the complete cache of `plan`, and compute some of its documents again.

    Raises:
        UsageError: the directory is another cache.
        DataError: bytes are not those that were written.
    """
    directory = CacheDirectory(plan.path, plan.fingerprints)
    reader = CacheReader(directory, plan.codec)
    for record in reader.records:
        file = directory.shard(record.index)
        if file_sha256(file) != record.sha256:
            raise DataError(
                f"{file} is damaged: its bytes are not those that were written",
                hint="remove it, then write it again with `tessera distill cache`",
            )
    listener(Note(f"teacher cache, {plan.split}: {len(reader.records)} shards read, all as written"))
    head = teacher.head_weight.detach().float()
    stride = max(1, len(plan.shards) // RECOMPUTED_SHARDS)
    num_recomputed = num_equal = 0
    for shard in plan.shards[::stride][:RECOMPUTED_SHARDS]:
        first = PlannedShard(shard.micro_batches[:1], shard.keys, shard.num_targets)
        for _, documents in encode_shard(first, teacher, head, plan.codec):
            stored = reader.read([document.key for document in documents])
            for document, tensors in zip(documents, stored, strict=True):
                num_recomputed += 1
                num_equal += all(torch.equal(tensors[name], document.tensors[name]) for name in tensors)
    return Verification(num_recomputed, num_equal)
