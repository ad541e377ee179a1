import errno
from pathlib import Path

import pytest

from tessera_cli.errors import UsageError
from tessera_cli.recipe.loader import load_recipe
from tessera_cli.recipe.template import write_template


def test_the_template_is_a_sound_recipe_of_the_given_name(tmp_path: Path) -> None:
    path = write_template("mine", tmp_path, force=False)
    assert load_recipe(path).recipe.name == "mine"
    assert [file.name for file in tmp_path.iterdir()] == ["mine.yaml"]


def test_an_existing_recipe_is_only_replaced_by_force(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(UsageError, match="exists"):
        write_template("mine", tmp_path, force=False)
    assert path.read_text(encoding="utf-8") == "precious"
    write_template("mine", tmp_path, force=True)
    assert load_recipe(path).recipe.name == "mine"


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "a b"])
def test_a_name_that_no_run_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot name"):
        write_template(name, tmp_path, force=False)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="full"):
        write_template("tiny", tmp_path, force=False)
    assert list(tmp_path.iterdir()) == []
