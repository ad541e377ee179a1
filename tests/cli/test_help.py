import subprocess
import sys

import pytest

from tessera_cli import __version__
from tessera_cli.cli.app import run

HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "matplotlib", "click")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["distill", "--help"],
        ["distill", "run", "--help"],
        ["generate", "--help"],
        ["bench", "-h"],
        ["distill", "pln"],
        ["distill", "plan", "--schema"],
    ],
    ids=" ".join,
)
def test_what_needs_no_model_loads_no_heavy_library(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from tessera_cli.cli.app import run\n"
        f"run({arguments!r})\n"
        f"sys.exit(', '.join(name for name in {HEAVY!r} if name in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tessera {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["distill"]])
def test_no_command_is_help_on_stdout_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert "Commands:" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    "arguments",
    [[], ["distill"], ["distill", "run"], ["distill", "plan"], ["distill", "init"], ["distill", "eval"]]
    + [["distill", "show"], ["env"], ["generate"], ["bench"]],
    ids=" ".join,
)
def test_every_page_fits_80_columns_and_every_option_is_explained(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*arguments, "-h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.strip() in ("--json", "--device", "--quiet")] == []


def test_a_recipe_alone_means_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["distill", "-h"]) == 0
    assert "`tessera distill RECIPE` means `tessera distill run RECIPE`" in capsys.readouterr().out
