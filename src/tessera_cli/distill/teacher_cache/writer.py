"""Runs the teacher over a plan and writes the shards that are not there yet."""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.distill.data.corpus import build_batch
from tessera_cli.distill.events import Listener, Note
from tessera_cli.distill.students.student import forward_batch
from tessera_cli.distill.teacher_cache.codec import Codec, Kept
from tessera_cli.distill.teacher_cache.keys import batch_keys, batch_target_counts
from tessera_cli.distill.teacher_cache.layout import CacheDirectory, ShardRecord
from tessera_cli.distill.teacher_cache.plan import CachePlan, PlannedShard
from tessera_cli.models.decoder import Decoder

NOTE_SECONDS = 10.0


@dataclass(frozen=True, eq=False)
class EncodedDocument:
    """What is kept of one document, and how much of the teacher that is."""

    key: bytes
    num_targets: int
    tensors: dict[str, Tensor]
    kept: Kept


def write_cache(plan: CachePlan, teacher: Decoder, listener: Listener) -> None:
    """Bring the cache of `plan` to hold all its documents.

    Ctrl-C leaves every complete shard; the next call goes on after them and ends with the same bytes.

    Raises:
        UsageError: the directory belongs to something else, or another process writes it.
        RunError: the file system refuses.
    """
    directory = CacheDirectory(plan.path, plan.fingerprints)
    with directory.writing():
        records = _agreeing(directory.records(), plan.shards)
        directory.keep(records)
        progress = _Progress(plan, sum(record.targets for record in records), listener)
        head = teacher.head_weight.detach().float()
        complete = {record.index for record in records}
        for index, shard in enumerate(plan.shards):
            if index in complete:
                continue
            documents: list[EncodedDocument] = []
            for num_tokens, encoded in encode_shard(shard, teacher, head, plan.codec):
                documents += encoded
                progress.batch_done(num_tokens, encoded)
            directory.add(_save(directory, index, shard, documents))


def encode_shard(
    shard: PlannedShard, teacher: Decoder, head: Tensor, codec: Codec
) -> Iterator[tuple[int, list[EncodedDocument]]]:
    """Each micro-batch: the number of its tokens, and its documents that are kept in this shard.

    The teacher sees whole micro-batches, as in an uncached run: the bits of a product depend on its shape.
    """
    missing = set(shard.keys)
    for micro_batch in shard.micro_batches:
        batch = build_batch(micro_batch)
        encoded = []
        with torch.inference_mode():
            hidden = forward_batch(teacher, batch)
            hidden = hidden.index_select(0, batch.target_index.to(hidden.device))
            for key, states in zip(batch_keys(batch), hidden.split(batch_target_counts(batch)), strict=True):
                if key in missing:
                    missing.remove(key)
                    encoded.append(EncodedDocument(key, len(states), *codec.encode(states, head, key)))
        yield len(batch.input_ids), encoded


def _save(
    directory: CacheDirectory, index: int, shard: PlannedShard, documents: Sequence[EncodedDocument]
) -> ShardRecord:
    """Write a shard: its documents' tensors end to end, their `keys`, and where each begins.

    `offsets` int64 [documents + 1, names] has the first row of each document in each tensor, by sorted name.
    """
    parts = [document.tensors for document in documents]
    names = sorted(parts[0])
    sizes = torch.tensor([[0] * len(names), *([len(part[name]) for name in names] for part in parts)])
    keys = torch.frombuffer(bytearray(b"".join(document.key for document in documents)), dtype=torch.uint8)
    tensors = {name: torch.cat([part[name] for part in parts]).contiguous() for name in names}
    tensors |= {"keys": keys.reshape(len(documents), -1), "offsets": sizes.cumsum(0)}
    file_bytes, sha256 = directory.save(index, tensors)
    mass, kl, kl_targets = (math.fsum(figures) for figures in zip(*(d.kept for d in documents), strict=True))
    return ShardRecord(
        index=index,
        documents=len(documents),
        targets=shard.num_targets,
        file_bytes=file_bytes,
        sha256=sha256,
        keys=shard.digest,
        kept_mass=mass / kl_targets,
        kl=kl / kl_targets,
        kl_targets=int(kl_targets),
    )


def _agreeing(records: list[ShardRecord], shards: Sequence[PlannedShard]) -> list[ShardRecord]:
    """The records that are just what `shards` would write."""
    digests = [shard.digest for shard in shards]
    return [record for record in records if digests[record.index : record.index + 1] == [record.keys]]


class _Progress:
    """Tells now and then how far a cache is."""

    def __init__(self, plan: CachePlan, done: int, listener: Listener) -> None:
        self._plan, self._done, self._listener = plan, done, listener
        self._num_tokens = 0
        self._start = self._told = time.perf_counter()
        if done:
            listener(Note(f"{plan.path} has {done:,} of {plan.num_targets:,} tokens already"))

    def batch_done(self, num_tokens: int, encoded: Sequence[EncodedDocument]) -> None:
        """Count a micro-batch of `num_tokens` and what was kept of it."""
        self._num_tokens += num_tokens
        self._done += sum(document.num_targets for document in encoded)
        now = time.perf_counter()
        if now - self._told >= NOTE_SECONDS or self._done == self._plan.num_targets:
            self._told = now
            self._listener(
                Note(
                    f"teacher cache, {self._plan.split}: {self._done:,} of {self._plan.num_targets:,} "
                    f"supervised tokens, {self._num_tokens / (now - self._start):,.0f} tokens/s"
                )
            )
