import os
import subprocess
import sys

import pytest

from tessera_cli import __version__
from tessera_cli.cli.app import run

HEAVY = ("torch", "transformers", "datasets", "accelerate", "numpy", "matplotlib", "click")


LIGHT = (
    "--version",
    "--help",
    "distill --help",
    "distill run --help",
    "generate --help",
    "bench -h",
    "bench compare -h",
    "simulate --help",
    "trace --help",
    "distill pln",
    "distill missing.yaml",
    "distill plan --schema",
)


def test_what_needs_no_model_loads_no_heavy_library() -> None:
    program = (
        "import sys\n"
        "from tessera_cli.cli.app import run\n"
        f"for line in {LIGHT!r}:\n"
        "    run(line.split())\n"
        f"    loaded = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "    if loaded:\n"
        "        sys.exit(f'{line} loads {loaded}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "index", "offered"),
    [
        ("tessera distill p", 2, "plan"),
        ("tessera distill run --res", 3, "--resume"),
        ("tessera distill some.yaml --res", 3, "--resume"),
    ],
)
def test_the_shell_completes_with_and_without_run(words: str, index: int, offered: str) -> None:
    environment = os.environ | {
        "_TESSERA_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(index),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from tessera_cli.cli.app import main; main()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == [offered]


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
    "command",
    ["", "distill", "env", "generate", "bench", "bench compare"]
    + [f"distill {name}" for name in ("run", "plan", "init", "eval", "show")],
)
def test_every_page_fits_80_columns_and_every_option_is_explained(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command.split(), "-h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.strip() in ("--json", "--device", "--quiet")] == []


def test_a_recipe_alone_means_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["distill", "-h"]) == 0
    assert "`tessera distill RECIPE` means `tessera distill run RECIPE`" in capsys.readouterr().out
