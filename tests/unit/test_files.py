from pathlib import Path

import pytest

from tessera_cli.files import write_file


def test_a_failed_write_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "there.txt"
    write_file(target, "old")
    blocked = tmp_path / "directory"
    (blocked / "child").mkdir(parents=True)
    with pytest.raises(OSError, match="directory") as caught:
        write_file(blocked, "new")
    assert caught.value.filename == str(blocked)
    with pytest.raises(OSError, match="missing") as caught:
        write_file(tmp_path / "missing" / "file.txt", "new")
    assert caught.value.filename == str(tmp_path / "missing" / "file.txt")
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "there.txt"]
