"""Checkpoints that are whole or not there, and that a run resumes from bit by bit.

A checkpoint is a directory `step-000100` with the student's weights, AdamW's state and `state.json`. It is
written under another name, flushed to the disk and renamed, so a directory of that name is complete.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tessera_cli.errors import RunError, UsageError
from tessera_cli.files import sync

STUDENT_FILE = "student.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
AVERAGE_FILE = "average.safetensors"
STATE_FILE = "state.json"

_NAME = re.compile(r"step-(\d{6,})")
_UNFINISHED = ".unfinished-"
_REMOVED = ".removed-"


class LossScale(NamedTuple):
    """What a float16 loss is multiplied by, and the steps since it last changed."""

    scale: float
    good_steps: int


@dataclass(frozen=True)
class TrainerState:
    """All that the next step depends on, apart from the data.

    `student` maps the names of trained parameters to float32 weights, those of a loss of hidden states under
    `hidden.`, `optimizer` "parameter name/key" to AdamW's tensors, `average` the names to the weights' moving
    average, where there is one; `tokens` and `supervised_tokens` are counted since the start of the run.
    """

    step: int
    tokens: int
    supervised_tokens: int
    student: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    average: dict[str, Tensor] = field(default_factory=dict)
    loss_scale: LossScale | None = None

    @property
    def measured(self) -> dict[str, Tensor]:
        """The weights to measure and export."""
        return self.average or self.student


class _Manifest(BaseModel):
    """What `state.json` holds; `file_bytes` tells a damaged copy from a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Literal["tessera-checkpoint-2"] = "tessera-checkpoint-2"
    step: NonNegativeInt
    tokens: NonNegativeInt
    supervised_tokens: NonNegativeInt
    loss_scale: tuple[float, int] | None
    fingerprints: dict[str, str]
    file_bytes: dict[str, NonNegativeInt]


def save_checkpoint(
    directory: Path,
    state: TrainerState,
    *,
    fingerprints: Mapping[str, str],
    keep: int,
    best_step: int | None = None,
) -> Path:
    """Write `directory/step-NNNNNN`, then remove all but the newest `keep` checkpoints and the best.

    Args:
        directory: the run's checkpoints; only one process writes to it.
        state: what to save.
        fingerprints: name -> hash of what a resumed run must share, such as recipe, data and teacher.
        keep: checkpoints to keep, at least 1.
        best_step: the step of the one that is kept besides.

    Returns:
        The checkpoint's directory.

    Raises:
        RunError: it could not be written; nothing of it stays.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    target = checkpoint_path(directory, state.step)
    best = None if best_step is None else checkpoint_path(directory, best_step)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(directory)
        unfinished = directory / f"{_UNFINISHED}{target.name}"
        try:
            _write(unfinished, state, fingerprints)
            if target.exists():  # damaged, or saved before the run was resumed from an older one
                _remove(target)
            unfinished.rename(target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        sync(directory)
        for old in _checkpoints(directory)[:-keep]:
            if old != best:
                _remove(old)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"checkpoint {target} could not be written: {error}",
            hint="make room on the disk, then use --resume",
        ) from error
    return target


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of `step` is or would be."""
    return directory / f"step-{step:06d}"


def latest_checkpoint(directory: Path) -> Path | None:
    """The newest complete checkpoint in `directory`, or None; anything damaged or foreign is passed over."""
    checkpoints = _checkpoints(directory)
    return checkpoints[-1] if checkpoints else None


def load_checkpoint(path: Path, *, fingerprints: Mapping[str, str]) -> TrainerState:
    """Read a checkpoint, on the CPU.

    Raises:
        UsageError: it is not a complete checkpoint, or it belongs to a run of other `fingerprints`.
    """
    manifest = _read_manifest(path)
    if manifest is None:
        raise UsageError(
            f"{path} is not a complete checkpoint", hint="resume from another one, or start anew"
        )
    saved = manifest.fingerprints
    changed = sorted(
        name for name in saved.keys() | fingerprints.keys() if saved.get(name) != fingerprints.get(name)
    )
    if changed:
        raise UsageError(
            f"{path} can not be resumed: {', '.join(changed)} changed since it was written",
            hint="undo the change, or start a new run",
        )
    files = (STUDENT_FILE, OPTIMIZER_FILE, AVERAGE_FILE)
    try:
        tensors = {name: load_file(path / name) for name in files if name in manifest.file_bytes}
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"{path} can not be read: {error}", hint="resume from another one, or start anew"
        ) from error
    return TrainerState(
        step=manifest.step,
        tokens=manifest.tokens,
        supervised_tokens=manifest.supervised_tokens,
        student=tensors[STUDENT_FILE],
        optimizer=tensors[OPTIMIZER_FILE],
        average=tensors.get(AVERAGE_FILE, {}),
        loss_scale=None if manifest.loss_scale is None else LossScale(*manifest.loss_scale),
    )


def _write(path: Path, state: TrainerState, fingerprints: Mapping[str, str]) -> None:
    path.mkdir()
    tensors = {STUDENT_FILE: state.student, OPTIMIZER_FILE: state.optimizer}
    if state.average:
        tensors[AVERAGE_FILE] = state.average
    for name, content in tensors.items():
        save_file({key: tensor.detach().contiguous() for key, tensor in content.items()}, path / name)
        sync(path / name)
    manifest = _Manifest(
        step=state.step,
        tokens=state.tokens,
        supervised_tokens=state.supervised_tokens,
        loss_scale=state.loss_scale,
        fingerprints=dict(fingerprints),
        file_bytes={name: (path / name).stat().st_size for name in tensors},
    )
    (path / STATE_FILE).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")
    sync(path / STATE_FILE)
    sync(path)


def _read_manifest(path: Path) -> _Manifest | None:
    """The manifest of the complete checkpoint at `path`; None if it is anything else."""
    name = _NAME.fullmatch(path.name)
    if name is None or not (path / STATE_FILE).is_file():
        return None
    try:
        manifest = _Manifest.model_validate_json((path / STATE_FILE).read_bytes())
    except ValidationError:
        return None
    sizes = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    whole = manifest.step == int(name[1]) and manifest.file_bytes == sizes
    return manifest if whole else None


def _checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of `directory`, oldest first."""
    if not directory.is_dir():
        return []
    found = [(manifest.step, path) for path in directory.iterdir() if (manifest := _read_manifest(path))]
    return [path for _, path in sorted(found)]


def _remove(checkpoint: Path) -> None:
    # Renamed first: a removal that is cut short must not leave something that looks like a checkpoint.
    doomed = checkpoint.rename(checkpoint.with_name(f"{_REMOVED}{checkpoint.name}"))
    shutil.rmtree(doomed)


def _remove_leftovers(directory: Path) -> None:
    """Clear what a process that was killed left behind."""
    for prefix in (_UNFINISHED, _REMOVED):
        for path in directory.glob(f"{prefix}*"):
            shutil.rmtree(path)
