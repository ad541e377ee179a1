"""A model directory of int8 weights, made of one that is not quantised."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from tessera_cli.errors import ModelError, RunError, UsageError
from tessera_cli.files import foreign_names
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.loader import load_int8_decoder, save_decoder, select_dtype
from tessera_cli.models.tokenizer import TOKENIZER_FILES, Tokenizer
from tessera_cli.models.weight_files import INT8_WEIGHTS, num_stored_bytes


@dataclass(frozen=True)
class Int8Checkpoint:
    """What became of a checkpoint: where it is, and the bytes of both weight files."""

    path: Path
    source_bytes: int
    int8_bytes: int


def check_source(source: Path) -> None:
    """See that `source` can be quantised.

    Raises:
        ModelError: it is not a native model, is quantised already, or has no tokenizer.
    """
    ModelConfig.unquantised(source)
    Tokenizer.from_dir(source)


def check_target(target: Path, source: Path, *, overwrite: bool) -> None:
    """See that the int8 form of `source` may be written to the directory `target`.

    Raises:
        UsageError: it is a file, holds `source`, is not empty, or, to be overwritten, does not hold a
            quantised model and nothing else.
    """
    real_target, real_source = _real(target), _real(source)
    if real_target == real_source:
        raise UsageError(f"{target} is the model itself", hint="write to another directory")
    if real_target in real_source.parents:
        raise UsageError(f"{target} holds the model itself", hint="write to another directory")
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is not a directory")
    if not target.exists() or not any(target.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{target} is not empty", hint="replace it with --overwrite")
    # Only what is known to be a quantised model is ever deleted.
    try:
        is_int8 = ModelConfig.from_dir(target).quantization == "int8"
    except ModelError:
        is_int8 = False
    if not is_int8:
        raise UsageError(f"{target} holds something else than a quantised model", hint="write to another one")
    if foreign := foreign_names(target, ("config.json", INT8_WEIGHTS, *TOKENIZER_FILES)):
        raise UsageError(
            f"{target} holds more than a quantised model: {', '.join(foreign)}",
            hint="move these away, or write to another directory",
        )


def write_int8_checkpoint(source: Path, target: Path, *, overwrite: bool) -> Int8Checkpoint:
    """Quantise the model directory `source` into `target`, which appears whole or not at all.

    Norms and biases keep the dtype that they are stored in.

    Raises:
        ModelError: as `check_source`, or the weights are broken.
        UsageError: as `check_target`.
        RunError: it could not be written.
    """
    check_source(source)
    check_target(target, source, overwrite=overwrite)
    stored = ModelConfig.from_dir(source).dtype
    dtype = select_dtype(stored, stored, "cpu")
    place = _real(target)  # what a link points to is written, not the link
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
        try:
            made = work / "made"
            made.mkdir()
            save_decoder(load_int8_decoder(source, dtype=dtype), made, dtype=dtype)
            Tokenizer.from_dir(source).save(made)
            check_target(target, source, overwrite=overwrite)  # quantising took a while
            _put(made, place, replaced=work / "replaced")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"cannot write {target}: {error}", hint="free space, or write to another disk"
        ) from error
    return Int8Checkpoint(target, num_stored_bytes(source), num_stored_bytes(target))


def _put(made: Path, target: Path, *, replaced: Path) -> None:
    """Rename `made` to `target`, and what was there to `replaced`: both or, whatever interrupts, neither."""
    try:
        if target.exists():
            target.rename(replaced)
        made.rename(target)
    except BaseException:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        raise


def _real(path: Path) -> Path:
    # `Path.resolve` raises at links that go round in a circle.
    return Path(os.path.realpath(path))
