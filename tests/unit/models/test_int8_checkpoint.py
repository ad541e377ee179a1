"""A quantised directory appears whole or not at all, where it was asked for and over nothing else."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tessera_cli.errors import RunError, UsageError
from tessera_cli.models import int8_checkpoint
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.int8_checkpoint import check_target, write_int8_checkpoint


@pytest.fixture
def int8_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return write_int8_checkpoint(tiny_model_dir, tmp_path / "int8", overwrite=False).path


def test_only_a_quantised_model_is_ever_overwritten(
    tiny_model_dir: Path, int8_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="is the model itself"):
        check_target(tiny_model_dir, tiny_model_dir, overwrite=True)
    inside = shutil.copytree(tiny_model_dir, int8_dir / "source")
    with pytest.raises(UsageError, match="holds the model itself"):
        check_target(int8_dir, inside, overwrite=True)
    with pytest.raises(UsageError, match="is not empty"):
        check_target(int8_dir, tiny_model_dir, overwrite=False)
    other = shutil.copytree(tiny_model_dir, tmp_path / "other")
    for overwrite, match in ((False, "is not empty"), (True, "something else than a quantised model")):
        with pytest.raises(UsageError, match=match):
            check_target(other, tiny_model_dir, overwrite=overwrite)
    shutil.rmtree(inside)
    (int8_dir / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds more than a quantised model: notes\.txt"):
        write_int8_checkpoint(tiny_model_dir, int8_dir, overwrite=True)
    assert (int8_dir / "notes.txt").read_text() == "mine"
    (int8_dir / "notes.txt").unlink()
    write_int8_checkpoint(tiny_model_dir, int8_dir, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a directory"):
        check_target(tmp_path / "file", tiny_model_dir, overwrite=True)
    (tmp_path / "empty").mkdir()
    write_int8_checkpoint(tiny_model_dir, tmp_path / "empty", overwrite=False)


def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
    tiny_model_dir: Path, int8_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in int8_dir.iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(int8_checkpoint, "save_decoder", full)
    for target in (int8_dir, tmp_path / "new"):
        with pytest.raises(RunError, match=r"cannot write .*No space left"):
            write_int8_checkpoint(tiny_model_dir, target, overwrite=True)
    assert {file.name: file.read_bytes() for file in int8_dir.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["int8"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_came_into_the_directory_while_it_was_made_is_not_replaced(
    overwrite: bool, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "int8"
    save = int8_checkpoint.save_decoder

    def meanwhile(*args: Any, **how: Any) -> None:
        save(*args, **how)
        target.mkdir()
        (target / "notes.txt").write_text("mine")

    monkeypatch.setattr(int8_checkpoint, "save_decoder", meanwhile)
    with pytest.raises(UsageError, match=r"int8 (is not empty|holds something else)"):
        write_int8_checkpoint(tiny_model_dir, target, overwrite=overwrite)
    assert (target / "notes.txt").read_text() == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["int8"]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("num_renames", [1, 2])
def test_ctrl_c_between_the_renames_leaves_the_old_model_or_the_new_one(
    num_renames: int, moment: str, tiny_model_dir: Path, int8_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, calls = Path.rename, 0

    def interrupted(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == num_renames and moment == "before":
            raise KeyboardInterrupt
        renamed = rename(path, target)
        if calls == num_renames:
            raise KeyboardInterrupt
        return renamed

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_int8_checkpoint(tiny_model_dir, int8_dir, overwrite=True)
    assert ModelConfig.from_dir(int8_dir).quantization == "int8"
    assert [file.name for file in int8_dir.parent.iterdir()] == [int8_dir.name]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_one_and_what_it_points_to_is_written(
    exists: bool, tiny_model_dir: Path, tmp_path: Path
) -> None:
    place, link = tmp_path / "disk" / "place", tmp_path / "link"
    if exists:
        place.mkdir(parents=True)
    link.symlink_to(place)
    write_int8_checkpoint(tiny_model_dir, link, overwrite=False)
    write_int8_checkpoint(tiny_model_dir, link, overwrite=True)
    assert link.is_symlink()
    assert ModelConfig.from_dir(place).quantization == "int8"
    assert [file.name for file in place.parent.iterdir()] == ["place"]


def test_links_that_go_round_in_a_circle_are_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(RunError, match="cannot write"):
        write_int8_checkpoint(tiny_model_dir, link, overwrite=False)
    assert [file.name for file in tmp_path.iterdir()] == ["link"]


def test_sizes_are_those_of_the_files_that_are_read(tiny_model_dir: Path, tmp_path: Path) -> None:
    source = shutil.copytree(tiny_model_dir, tmp_path / "source")
    shutil.copyfile(source / "model.safetensors", source / "consolidated.safetensors")
    written = write_int8_checkpoint(source, tmp_path / "int8", overwrite=False)
    assert written.source_bytes == (source / "model.safetensors").stat().st_size
