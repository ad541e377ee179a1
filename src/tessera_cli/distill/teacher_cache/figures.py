"""What a cache costs and how much of the teacher it holds."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tessera_cli.distill.teacher_cache.layout import ShardRecord


@dataclass(frozen=True)
class CacheFigures:
    """A cache in figures, over supervised tokens.

    Attributes:
        split: "train" or "eval".
        path: its directory.
        num_documents: documents, each once.
        num_tokens: their supervised tokens.
        file_bytes: of all shards.
        bytes_per_token: of them, for a supervised token.
        kept_mass: the teacher's mean probability of the tokens that are kept, 1 where all are.
        kl: KL between the teacher and what is kept of it, nats a token; each codec says in which direction.
    """

    split: str
    path: Path
    num_shards: int
    num_documents: int
    num_tokens: int
    file_bytes: int
    bytes_per_token: float
    kept_mass: float
    kl: float

    @classmethod
    def of(cls, split: str, path: Path, records: Sequence[ShardRecord]) -> "CacheFigures":
        """The figures of a cache of at least one shard."""
        num_tokens = sum(record.targets for record in records)
        file_bytes = sum(record.file_bytes for record in records)
        measured = sum(record.kl_targets for record in records)
        return cls(
            split=split,
            path=path,
            num_shards=len(records),
            num_documents=sum(record.documents for record in records),
            num_tokens=num_tokens,
            file_bytes=file_bytes,
            bytes_per_token=file_bytes / num_tokens,
            kept_mass=math.fsum(record.kept_mass * record.kl_targets for record in records) / measured,
            kl=math.fsum(record.kl * record.kl_targets for record in records) / measured,
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the same names, for JSON."""
        return asdict(self) | {"path": str(self.path)}
