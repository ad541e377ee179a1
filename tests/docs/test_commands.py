"""Every shell command in the documentation is one that exists."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tessera_cli.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "recipes/data/README.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
]
BASH_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPERATORS = {"|", "||", "&", "&&", ";"}


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each simple command: comments, assignments in front and redirections are left out."""
    for block in BASH_BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            command: list[str] = []
            for word in [*lexer, ";"]:
                if word not in OPERATORS:
                    command.append(word)
                elif command:
                    yield _without_redirections_and_assignments(command)
                    command = []


def _without_redirections_and_assignments(command: list[str]) -> list[str]:
    words = command[: next((at for at, word in enumerate(command) if set(word) <= {"<", ">"}), None)]
    start = next(at for at, word in enumerate(words) if not re.match(r"\w+=", word))
    return words[start:]


COMMANDS = [
    pytest.param(command, id=f"{page}: {shlex.join(command)}")
    for page in PAGES
    for command in commands_in((ROOT / page).read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_commands_exist(command: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    check(command)


def check(command: list[str]) -> None:
    match command:
        case ["tessera", *arguments]:
            check_tessera(arguments)
        case ["accelerate", "launch", *arguments] | ["torchrun", *arguments]:
            assert "-m tessera_cli" in shlex.join(arguments), "only Tessera is launched"
            check_tessera(arguments[arguments.index("tessera_cli") + 1 :])
        case ["make", *targets]:
            check_make(targets)
        case ["pip", "install", *arguments]:
            check_extras(arguments)
        case ["python" | "python3", "-m", "venv", _] | ["git" | "cd" | "source" | "." | "curl", *_]:
            pass
        case ["pytest", *paths]:
            assert not [path for path in paths if not (ROOT / path).exists()]
        case ["python", script, *_]:
            assert (ROOT / script).is_file(), f"there is no {script}"
        case _:
            assert (ROOT / command[0]).is_file(), f"{command[0]} is unknown"


def check_tessera(arguments: list[str]) -> None:
    """With --help at the end, a command is looked up and its options are parsed, but nothing runs."""
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0, result.output


def check_make(targets: list[str]) -> None:
    made = subprocess.run(
        ["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


def check_extras(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = re.findall(r"\[([\w,-]+)\]", " ".join(arguments))
    assert {extra for extras in asked for extra in extras.split(",")} <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
    "command",
    [
        "tessera distil recipes/quickstart.yaml",
        "tessera generate --no-such-option",
        "accelerate launch -m tessera_cli distill run recipe.yaml --no-such-option",
        "torchrun --nproc-per-node 2 train.py",
        "tessera bench -o a.json --no-such-option 3",
        "make no-such-target",
        "python recipes/no_such_script.py",
        "pip install -e '.[dev,no-such-extra]'",
        "no-such-program",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str):
    with pytest.raises(AssertionError):
        check(shlex.split(command))


def test_commands_are_read_as_a_shell_reads_them():
    script = "# a comment\nA=1 B=2 make demo test > log 2>&1 && tessera env | head -n 1  # why\nx \\\n  -y\n"
    expected = [["make", "demo", "test"], ["tessera", "env"], ["head", "-n", "1"], ["x", "-y"]]
    assert list(commands_in(f"text\n\n```bash\n{script}```\n")) == expected
    assert list(commands_in("```text\nnot a command\n```\n")) == []
