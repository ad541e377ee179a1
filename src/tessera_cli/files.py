"""Files that appear whole or not at all."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an `OSError` of the body name `path`: alone a failed write names no file, or a temporary one."""
    try:
        yield
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


def write_file(path: Path, content: str | bytes) -> None:
    """Write `content`, text in UTF-8, so that `path` has all of it or is untouched."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def foreign_names(directory: Path, ours: Collection[str]) -> list[str]:
    """The names in `directory`, sorted, that are none of `ours` nor of what an unfinished write leaves."""
    names = sorted(entry.name for entry in directory.iterdir())
    return [name for name in names if name.removeprefix(".").removesuffix(".tmp") not in ours]


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
