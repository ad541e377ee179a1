import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera_cli.distill.training import checkpoint
from tessera_cli.distill.training.checkpoint import (
    TrainerState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from tessera_cli.errors import RunError, UsageError
from tests.training_factories import assert_same_bits

FINGERPRINTS = {"recipe": "a1", "data": "b2", "teacher": "c3"}


def _state(step: int) -> TrainerState:
    generator = torch.Generator().manual_seed(step)
    student = {"layer.weight": torch.randn(40, 30, generator=generator), "norm.weight": torch.ones(30)}
    optimizer = {
        f"{name}/{key}": torch.randn(value.shape, generator=generator)
        for name, value in student.items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return TrainerState(step, 10 * step, 7 * step, student, optimizer)


def _save(directory: Path, step: int, *, keep: int = 2) -> Path:
    return save_checkpoint(directory, _state(step), fingerprints=FINGERPRINTS, keep=keep)


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    path = _save(tmp_path / "checkpoints", 7)
    assert path == tmp_path / "checkpoints" / "step-000007" == latest_checkpoint(tmp_path / "checkpoints")
    loaded, saved = load_checkpoint(path, fingerprints=FINGERPRINTS), _state(7)
    assert (loaded.step, loaded.tokens, loaded.supervised_tokens) == (7, 70, 49)
    assert_same_bits(loaded.student, saved.student)
    assert_same_bits(loaded.optimizer, saved.optimizer)


def test_the_newest_are_kept_by_step_not_by_name(tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000):
        _save(tmp_path, step)
    assert _names(tmp_path) == ["step-1000000", "step-999999"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000"


def test_there_is_no_checkpoint_in_an_empty_or_missing_directory(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (FINGERPRINTS | {"data": "other"}, "data changed"),
        (FINGERPRINTS | {"data": "other", "recipe": "other"}, "data, recipe changed"),
        ({"recipe": "a1", "data": "b2"}, "teacher changed"),
        (FINGERPRINTS | {"tokenizer": "d4"}, "tokenizer changed"),
    ],
)
def test_a_run_that_changed_is_not_resumed(tmp_path: Path, now: dict[str, str], named: str) -> None:
    path = _save(tmp_path, 1)
    with pytest.raises(UsageError, match=named) as caught:
        load_checkpoint(path, fingerprints=now)
    assert caught.value.hint


def _truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _edit_state(path: Path, **changes: Any) -> None:
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | changes))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "state.json").unlink(),
        lambda path: (path / "student.safetensors").unlink(),
        lambda path: _truncate(path / "state.json"),
        lambda path: _truncate(path / "student.safetensors"),
        lambda path: _truncate(path / "optimizer.safetensors"),
        lambda path: _edit_state(path / "state.json", step=3),
        lambda path: _edit_state(path / "state.json", format="another"),
        lambda path: _edit_state(path / "state.json", unknown=1),
    ],
)
def test_a_damaged_or_foreign_directory_is_never_a_checkpoint(tmp_path: Path, damage: Any) -> None:
    good, damaged = _save(tmp_path, 1), _save(tmp_path, 2)
    damage(damaged)
    assert latest_checkpoint(tmp_path) == good
    with pytest.raises(UsageError, match="step-000002 is not a complete checkpoint"):
        load_checkpoint(damaged, fingerprints=FINGERPRINTS)
    assert _save(tmp_path, 2) == latest_checkpoint(tmp_path)


def test_a_copy_under_another_name_is_not_a_checkpoint(tmp_path: Path) -> None:
    good = _save(tmp_path, 1)
    shutil.copytree(good, tmp_path / "step-000009")
    shutil.copytree(good, tmp_path / "step-000001-old")
    (tmp_path / "step-000010").write_text("a file")
    assert latest_checkpoint(tmp_path) == good


def test_bytes_that_are_no_tensors_are_an_error_of_the_user(tmp_path: Path) -> None:
    path = _save(tmp_path, 1)
    size = (path / "student.safetensors").stat().st_size
    (path / "student.safetensors").write_bytes(b"\xff" * size)
    with pytest.raises(UsageError, match="step-000001 can not be read"):
        load_checkpoint(path, fingerprints=FINGERPRINTS)


@contextmanager
def _stopped_at(moment: int, error: BaseException) -> Iterator[None]:
    """The process is stopped by `error` when it flushes for the `moment`-th time."""
    calls = 0
    sync = checkpoint.sync

    def stop(path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            raise error
        sync(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "sync", stop)
        yield


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_a_save_that_fails_or_is_interrupted_leaves_nothing(tmp_path: Path, moment: int) -> None:
    good = _save(tmp_path, 1)
    with (
        _stopped_at(moment, OSError(28, "No space left on device")),
        pytest.raises(RunError, match="No space"),
    ):
        _save(tmp_path, 2)
    with _stopped_at(moment, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        _save(tmp_path, 2)
    assert _names(tmp_path) == [good.name]


@pytest.mark.parametrize("moment", [1, 2, 3, 4])
def test_a_killed_save_is_never_a_checkpoint_and_is_cleared_by_the_next(
    tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = _save(tmp_path, 1)
    with monkeypatch.context() as patch, _stopped_at(moment, SystemExit()):
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # a killed process cleans nothing up
        with pytest.raises(SystemExit):
            _save(tmp_path, 2)
    assert len(_names(tmp_path)) == 2
    assert latest_checkpoint(tmp_path) == good
    _save(tmp_path, 3)
    assert _names(tmp_path) == ["step-000001", "step-000003"]


def test_a_removal_that_is_cut_short_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        _save(tmp_path, 2, keep=1)
    assert checkpoint._checkpoints(tmp_path) == [tmp_path / "step-000002"]


def test_a_file_that_can_not_be_written_is_a_run_error(tmp_path: Path) -> None:
    good = _save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(RunError, match="step-000002 could not be written") as caught:
            _save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.hint
    assert _names(tmp_path) == [good.name]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep must be at least 1"):
        _save(tmp_path, 1, keep=0)
