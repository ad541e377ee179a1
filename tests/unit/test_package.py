"""What is built, installed and linted is all of the package."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pathspec import GitIgnoreSpec

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("part", ["sdist", "wheel"])
def test_no_module_is_left_out_of_what_is_built(part: str) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        build = tomllib.load(file)["tool"]["scikit-build"]
    patterns = [*(ROOT / ".gitignore").read_text().splitlines(), *build[part]["exclude"]]
    assert list(GitIgnoreSpec.from_lines(patterns).match_files(MODULES)) == []


def test_no_module_is_left_out_of_what_is_linted() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--show-files", "src"]
    linted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert sorted(str(Path(line).relative_to(ROOT)) for line in linted.splitlines()) == MODULES
