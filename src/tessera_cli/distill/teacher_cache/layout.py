"""What a cache is on disk.

cache.json     the fingerprints of all that its numbers depend on
shards.jsonl   one line for every complete shard
shard-000000.safetensors, ...   the numbers

A shard is written under another name, flushed and renamed before its line is added, and its bytes follow from
the fingerprints and the documents alone: a cache that was stopped at any byte goes on from the last line and
ends equal to one that was not.
"""

import fcntl
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tessera_cli.errors import RunError, UsageError
from tessera_cli.files import sync

MANIFEST_FILE = "cache.json"
RECORDS_FILE = "shards.jsonl"
LOCK_FILE = ".lock"


class ShardRecord(BaseModel):
    """A complete shard.

    `keys` is a hash of its documents' keys; `kept_mass` the mean probability of what is kept at a target;
    `kl` the mean KL between the teacher and what is kept of it, in nats, over `kl_targets` targets.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    index: NonNegativeInt
    documents: PositiveInt
    targets: PositiveInt
    file_bytes: PositiveInt
    sha256: str
    keys: str
    kept_mass: float
    kl: float
    kl_targets: NonNegativeInt


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["tessera-teacher-cache-1"] = "tessera-teacher-cache-1"
    fingerprints: dict[str, str]


class CacheDirectory:
    """A cache's directory, seen to belong to `fingerprints`; it need not exist yet.

    Raises:
        UsageError: it holds something else, or the cache of other `fingerprints`; says which ones differ.
    """

    def __init__(self, path: Path, fingerprints: Mapping[str, str]) -> None:
        self.path, self._fingerprints = path, dict(fingerprints)
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path} is not a directory", hint="name another teacher.cache.path")
        if not path.exists() or not (set(os.listdir(path)) - {LOCK_FILE}):
            return
        try:
            there = _Manifest.model_validate_json((path / MANIFEST_FILE).read_bytes()).fingerprints
        except FileNotFoundError:
            raise UsageError(
                f"{path} is no teacher cache and is not empty", hint="name another teacher.cache.path"
            ) from None
        except (OSError, ValidationError) as error:
            raise UsageError(f"{path / MANIFEST_FILE} is damaged", hint=f"remove {path}") from error
        differences = [
            f"{name} ({_short(there.get(name))} there, {_short(self._fingerprints.get(name))} here)"
            for name in sorted(there.keys() | self._fingerprints.keys())
            if there.get(name) != self._fingerprints.get(name)
        ]
        if differences:
            raise UsageError(
                f"{path} is the cache of another run: {', '.join(differences)}",
                hint="restore what changed, name another teacher.cache.path, or remove the directory",
            )

    def shard(self, index: int) -> Path:
        """Where shard `index` is, or would be."""
        return self.path / f"shard-{index:06d}.safetensors"

    def records(self) -> list[ShardRecord]:
        """The complete shards by index: their lines are whole, their files there and of the right size."""
        records: dict[int, ShardRecord] = {}
        for line in self._lines():
            try:
                record = ShardRecord.model_validate_json(line)
            except ValidationError:
                continue
            file = self.shard(record.index)
            if file.is_file() and file.stat().st_size == record.file_bytes:
                records[record.index] = record
        return [records[index] for index in sorted(records)]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Claim the directory for this process, and clear what a killed one left.

        Raises:
            UsageError: another process writes it, or the file system refuses.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / LOCK_FILE).open("w")
        except OSError as error:
            raise UsageError(
                f"cannot create {self.path}: {error.strerror}", hint="name another teacher.cache.path"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(
                    f"{self.path} is being written by another process", hint="wait for it to end"
                ) from None
            with _told(self.path):
                for leftover in self.path.glob(".*.tmp"):
                    leftover.unlink()
                if not (self.path / MANIFEST_FILE).exists():
                    manifest = _Manifest(fingerprints=self._fingerprints)
                    self._write(MANIFEST_FILE, manifest.model_dump_json(indent=2) + "\n")
            yield

    def keep(self, records: list[ShardRecord]) -> None:
        """Forget all other shards, and a line that was cut off."""
        with _told(self.path):
            kept = {self.shard(record.index) for record in records}
            for file in self.path.glob("shard-*.safetensors"):
                if file not in kept:
                    file.unlink()
            if self._lines() != [record.model_dump_json() for record in records] or not self._ends_whole():
                self._write(RECORDS_FILE, "".join(record.model_dump_json() + "\n" for record in records))

    def save(self, index: int, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
        """Write shard `index`, whole or not at all; its size in bytes and its SHA-256.

        Raises:
            RunError: the file system refuses.
        """
        file = self.shard(index)
        temporary = file.with_name(f".{file.name}.tmp")
        with _told(file):
            try:
                # No metadata: safetensors writes more than one entry in no fixed order.
                save_file(dict(tensors), temporary)
                # safetensors writes for its owner only.
                temporary.chmod((self.path / MANIFEST_FILE).stat().st_mode & 0o777)
                sync(temporary)
                digest = file_sha256(temporary)
                temporary.replace(file)
            finally:
                temporary.unlink(missing_ok=True)
            sync(self.path)
            return file.stat().st_size, digest

    def add(self, record: ShardRecord) -> None:
        """Add the line of a shard that was saved."""
        path = self.path / RECORDS_FILE
        with _told(path), path.open("a", encoding="utf-8") as file:
            file.write(record.model_dump_json() + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _lines(self) -> list[str]:
        path = self.path / RECORDS_FILE
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        return [line.rstrip("\n") for line in lines if line.endswith("\n")]

    def _ends_whole(self) -> bool:
        path = self.path / RECORDS_FILE
        return path.exists() and path.read_bytes()[-1:] in (b"", b"\n")

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.tmp"
        try:
            temporary.write_text(text, encoding="utf-8")
            sync(temporary)
            temporary.replace(self.path / name)
        finally:
            temporary.unlink(missing_ok=True)
        sync(self.path)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"cannot write {path}: {reason}", hint="make room on the disk; what is complete is kept"
        ) from error


def _short(value: str | None) -> str:
    """A fingerprint in an error: hashes are cut."""
    return "none" if value is None else value if len(value) < 40 else f"{value[:8]}…"
