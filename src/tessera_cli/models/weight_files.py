"""The tensors of a model directory's safetensors files, one at a time."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tessera_cli.errors import ModelError

WEIGHTS = "model.safetensors"
# Not the name that transformers looks for: it would read int8 values without their scales, as a float model.
INT8_WEIGHTS = "model.int8.safetensors"
_INDEX = "model.safetensors.index.json"
# To open a file is to parse its header: once for a tensor would take as long as to read the small ones.
_MAPPED_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor as `file` has it, mapped from there."""

    name: str
    value: Tensor
    file: Path


def read_tensors(path: Path) -> Iterator[StoredTensor]:
    """The tensors of the directory `path`, of one file or of shards.

    A file is mapped anew for each 16 MB: only so much of it, and what the caller holds, is in memory.

    Raises:
        ModelError: a file is missing, damaged or cannot be read.
    """
    for file, names in _weight_files(path):
        if names is None:
            with _opened(file) as tensors:
                names = tensors.keys()
        left = deque(names)
        while left:
            with _opened(file) as tensors:
                num_bytes = 0
                while left and num_bytes < _MAPPED_BYTES:
                    name = left.popleft()
                    value = tensors.get_tensor(name)
                    num_bytes += value.nbytes
                    yield StoredTensor(name, value, file)


def num_stored_bytes(path: Path) -> int:
    """The size of the weight files of `path` together.

    Raises:
        ModelError: a file is missing, damaged or cannot be read.
    """
    num_bytes = 0
    for file, _ in _weight_files(path):
        with _opened(file):
            num_bytes += file.stat().st_size
    return num_bytes


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    hint = "download or convert the model again"
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged: {error}", hint=hint) from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}", hint=hint) from error


def _weight_files(path: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """The safetensors files of a directory, each with the tensors to take from it (None: all)."""
    index = path / _INDEX
    if index.exists():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {file: path / file for file in sorted(set(weight_map.values()))}
        except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
            raise ModelError(f"{index} cannot be read: {error}") from error
        for holder, file in files.items():
            yield file, sorted(name for name, named in weight_map.items() if named == holder)
    elif whole := [file for file in (path / WEIGHTS, path / INT8_WEIGHTS) if file.exists()]:
        yield whole[0], None
    else:
        raise ModelError(
            f"{path} has no model.safetensors",
            hint="Tessera reads safetensors (and .gguf files), not pickled weights",
        )
