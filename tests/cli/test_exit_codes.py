import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera_cli.cli import app as program
from tessera_cli.errors import CapacityError, GateError, RunError

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes `tessera env` raise."""

    def fail(error: BaseException) -> None:
        def environment(settings: object) -> dict[str, dict[str, str]]:
            raise error

        monkeypatch.setattr("tessera_cli.cli.environment.environment", environment)

    monkeypatch.delenv("TESSERA_DEBUG", raising=False)
    return fail


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CapacityError("too big", hint="be small"), 2, "error: too big\n\nhint: be small\n"),
        (RunError("diverged"), 1, "error: diverged\n"),
        (GateError("KL is 2, above 1"), 3, "error: KL is 2, above 1\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (
            OSError(errno.ENOSPC, "full", "/x"),
            1,
            "error: no space left on the disk: /x\n\nhint: free some space\n",
        ),
        (OSError(errno.EROFS, "Read-only", "/x"), 1, "error: /x: Read-only\n"),
        (MemoryError(), 1, "error: out of memory: no message\n"),
        (ValueError("odd\nlines"), 1, "error: ValueError: odd\n\nhint: this is a bug in Tessera;"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_is_a_message_and_its_exit_code(
    failing: Callable[[BaseException], None], capsys: Capsys, error: BaseException, code: int, message: str
) -> None:
    failing(error)
    assert program.run(["env"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(message)
    assert "Traceback" not in shown.err


def test_torch_out_of_memory_is_told_as_such(
    failing: Callable[[BaseException], None], capsys: Capsys
) -> None:
    import torch

    failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"))
    assert program.run(["env"]) == 1
    assert "error: out of memory: CUDA out of memory. Tried to allocate 2 GiB\n" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["option", "variable"])
def test_the_traceback_is_shown_on_demand_and_the_cause_stays_last(
    failing: Callable[[BaseException], None], capsys: Capsys, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    failing(ValueError("odd"))
    if by == "variable":
        monkeypatch.setenv("TESSERA_DEBUG", "1")
    program.run(["env", *(["--debug"] if by == "option" else [])])
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.index("Traceback") < shown.index("error: ValueError: odd")


def test_with_json_an_error_is_the_one_document_on_stdout(
    failing: Callable[[BaseException], None], capsys: Capsys
) -> None:
    failing(CapacityError("too big", hint="be small"))
    assert program.run(["env", "--json"]) == 2
    assert json.loads(capsys.readouterr().out) == {
        "error": {"type": "CapacityError", "message": "too big", "hint": "be small"}
    }


def test_a_missed_gate_adds_nothing_to_the_figures_on_stdout(
    failing: Callable[[BaseException], None], capsys: Capsys
) -> None:
    failing(GateError("KL is 2, above 1"))
    assert program.run(["env", "--json"]) == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["--nonsense"],
        ["generate", "--max-tokens", "many"],
        ["generate", "--kv-cache-memory", "2 GB and a bit"],
        ["generate", "--num-blocks", "0"],
        ["distill", "run"],
        ["distill", "run", "no-such.yaml"],
        ["distill", "no-such.yaml"],
        ["distill", "no/such"],
        ["distill", "--nonsense", "r.yaml"],
        ["distill", "plan"],
        ["distill", "plan", "--schema", "--yaml"],
        ["distill", "show", "no-such-run"],
        ["distill", "run", "r.yaml", "--resume", "--overwrite"],
        ["distill", "run", "r.yaml", "--dry-run", "--resume"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_exit_2_with_a_hint_and_clean_streams(
    arguments: list[str], capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert program.run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert "bug" not in shown.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "page"),
    [
        (["nonsense"], "tessera"),
        (["generate", "--nonsense"], "tessera generate"),
        (["distill", "--nonsense", "r.yaml"], "tessera distill run"),
        (["distill", "show", "--nonsense"], "tessera distill show"),
    ],
)
def test_the_hint_names_the_help_page(arguments: list[str], page: str, capsys: Capsys) -> None:
    assert program.run(arguments) == 2
    assert capsys.readouterr().err.endswith(f"hint: `{page} --help` shows what there is\n")


@pytest.mark.parametrize("name", ["TESSERA_DEBUG", "TESSERA_LOG_LEVEL", "HF_HUB_OFFLINE"])
def test_a_malformed_variable_is_exit_2_and_not_ignored(
    name: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "banana")
    assert program.run(["env"]) == 2
    assert name in capsys.readouterr().err


def in_shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in which `tessera` is this program."""
    script = f"tessera() {{ '{sys.executable}' -m tessera_cli \"$@\"; }}; {command}"
    return subprocess.run(
        ["sh", "-c", script],
        capture_output=True,
        encoding="utf-8",
        check=False,
        env=os.environ | variables,
    )


@pytest.mark.parametrize("command", ["distill plan --schema", "distill show none --json"])
def test_nobody_reading_is_no_traceback(command: str) -> None:
    done = in_shell(f"tessera {command} | true")
    assert "Traceback" not in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("command", "code"), [("--version", 0), ("distill show none", 2)])
def test_a_closed_stream_changes_nothing_else(command: str, code: int, streams: str) -> None:
    done = in_shell(f"tessera {command} {streams}")
    assert done.returncode == code
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_results_that_cannot_be_written_are_a_failure() -> None:
    done = in_shell("tessera --version > /dev/full")
    assert (done.returncode, done.stderr.splitlines()[0]) == (1, "error: no space left on the disk: output")
    assert in_shell("tessera distill show none 2> /dev/full").returncode == 2


def test_results_are_utf_8_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "run☃").mkdir()
    done = in_shell(f"tessera distill show {tmp_path}/run☃ --json", PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert "run☃" in json.loads(done.stdout)["error"]["message"]


def test_a_working_directory_that_is_gone_is_told(tmp_path: Path) -> None:
    done = in_shell(f"mkdir {tmp_path}/a && cd {tmp_path}/a && rmdir ../a && tessera distill init")
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "error: the working directory is gone")


@pytest.mark.parametrize("name", ["TESSERA_HOME", "XDG_CACHE_HOME"])
def test_a_home_that_does_not_exist_is_told(
    name: str, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TESSERA_HOME", raising=False)
    monkeypatch.setenv(name, "~no-such-user/x")
    assert program.run(["env"]) == 2
    assert "~no-such-user/x" in capsys.readouterr().err
