"""Gives the teacher's side of a batch's loss from a cache."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tessera_cli.distill.data.corpus import TrainBatch
from tessera_cli.distill.teacher_cache.codec import Codec
from tessera_cli.distill.teacher_cache.hidden import HiddenCodec
from tessera_cli.distill.teacher_cache.keys import batch_keys
from tessera_cli.distill.teacher_cache.layout import CacheDirectory, ShardRecord
from tessera_cli.distill.teacher_cache.targets import Targets
from tessera_cli.errors import DataError, RunError


@dataclass(frozen=True, eq=False)
class _Shard:
    """Which rows of each tensor are whose: `offsets` int64 `[documents + 1, names]`."""

    file: Path
    names: list[str]
    offsets: np.ndarray


class CacheReader:
    """Reads a cache, a document at a time, by the documents' content.

    Raises:
        DataError: a shard is damaged.
    """

    def __init__(self, directory: CacheDirectory, codec: Codec) -> None:
        self._codec = codec
        self.records: list[ShardRecord] = directory.records()
        self._shards: list[_Shard] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        for number, record in enumerate(self.records):
            shard, keys = _open_shard(directory.shard(record.index), record)
            self._shards.append(shard)
            self._places |= {key: (number, row) for row, key in enumerate(keys)}

    @property
    def keeps_hidden(self) -> bool:
        """Whether the teacher's head is multiplied with what is kept."""
        return isinstance(self._codec, HiddenCodec)

    def holds(self, keys: Iterable[bytes]) -> bool:
        """Whether every document of `keys` is there."""
        return all(key in self._places for key in keys)

    def read(self, keys: Sequence[bytes]) -> list[dict[str, Tensor]]:
        """What is kept of the documents of `keys`, in their order; CPU tensors as `Codec.encode` made them.

        Raises:
            KeyError: a document is not there.
            RunError: a shard is no longer there.
        """
        found: dict[bytes, dict[str, Tensor]] = {}
        by_shard: dict[int, list[tuple[bytes, int]]] = {}
        for key in keys:
            number, row = self._places[key]
            by_shard.setdefault(number, []).append((key, row))
        for number, rows in by_shard.items():
            shard = self._shards[number]
            try:
                with safe_open(shard.file, framework="pt") as file:
                    for key, row in rows:
                        spans = zip(shard.names, *shard.offsets[row : row + 2].tolist(), strict=True)
                        found[key] = {name: file.get_slice(name)[start:end] for name, start, end in spans}
            except (OSError, SafetensorError) as error:
                raise RunError(
                    f"cannot read {shard.file}: {error}", hint="write it again with `tessera distill cache`"
                ) from error
        return [found[key] for key in keys]

    def targets(self, batch: TrainBatch, head: Tensor) -> Targets:
        """The teacher's side of the loss of `batch`, on the device of its float32 `head` [vocab, hidden]."""
        return self._codec.decode(self.read(batch_keys(batch)), head)


def _open_shard(path: Path, record: ShardRecord) -> tuple[_Shard, list[bytes]]:
    hint = "remove it, then write it again with `tessera distill cache`"
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(set(file.keys()) - {"keys", "offsets"})
            keys, offsets = file.get_tensor("keys"), file.get_tensor("offsets")
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} is damaged: {error}", hint=hint) from error
    if hashlib.sha256(keys.numpy().tobytes()).hexdigest() != record.keys:
        raise DataError(f"{path} is damaged: it does not hold the documents that it should", hint=hint)
    return _Shard(path, names, offsets.numpy()), [row.tobytes() for row in keys.numpy()]
