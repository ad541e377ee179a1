import io
import json
import math
from pathlib import Path

import pytest

from tessera_cli.cli.answer_output import shown
from tessera_cli.cli.options import choose_model, parse_size
from tessera_cli.cli.output import Output, OutputMode, align
from tessera_cli.errors import RecipeError, UsageError
from tessera_cli.settings import Settings


def sink(mode: OutputMode) -> Output:
    return Output(mode, stdout=io.StringIO(), stderr=io.StringIO())


def text(stream: object) -> str:
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("mode", "out", "err"),
    [
        (OutputMode.HUMAN, "data\na  b\n", "note\nwarning: careful\n"),
        (OutputMode.QUIET, "data\na  b\n", "warning: careful\n"),
        (OutputMode.JSON, '{\n  "x": 1\n}\n', "note\nwarning: careful\n"),
    ],
)
def test_each_kind_of_text_goes_where_its_mode_says(mode: OutputMode, out: str, err: str) -> None:
    output = sink(mode)
    output.data("data")
    output.rows([("a", "b")])
    output.document({"x": 1})
    output.note("note")
    output.warning("careful")
    assert text(output.stdout) == out
    assert text(output.stderr) == err


def test_text_of_users_and_models_passes_unchanged() -> None:
    output = sink(OutputMode.HUMAN)
    odd = "[red]not red[/red] :smile: \x1b[31m {x} %s 日本"
    output.data(odd, end="")
    output.note(odd)
    assert text(output.stdout) == odd
    assert text(output.stderr) == odd + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_control_character_of_an_answer_reaches_a_terminal_and_a_pipe_gets_it_as_it_is() -> None:
    text = "a\tb\n\x1b[2J\x9b1m\x7f\r\x00 日本 é"
    told = shown(text, Output(stdout=Terminal()))
    assert told == "a\tb\n\\u001b[2J\\u009b1m\\u007f\\u000d\\u0000 日本 é"
    assert shown(text, Output(stdout=io.StringIO())) == text
    # What JSON leaves as it is stays JSON.
    assert json.loads(shown(json.dumps("\x9b1m", ensure_ascii=False), Output(stdout=Terminal()))) == "\x9b1m"


def test_an_error_in_json_has_its_problems_and_is_told_on_stderr_too() -> None:
    output = sink(OutputMode.JSON)
    output.error(RecipeError("r.yaml has 1 problem", ["line 1  x: unknown key"], hint="look"))
    assert json.loads(text(output.stdout))["error"] == {
        "type": "RecipeError",
        "message": "r.yaml has 1 problem",
        "hint": "look",
        "problems": ["line 1  x: unknown key"],
    }
    assert text(output.stderr) == "error: r.yaml has 1 problem\n  line 1  x: unknown key\n\nhint: look\n"


def test_not_a_number_is_never_written_as_json() -> None:
    with pytest.raises(ValueError, match="JSON"):
        sink(OutputMode.JSON).document({"x": math.nan})


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {}])
def test_the_console_of_a_pipe_has_no_escape_codes(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    output = sink(OutputMode.HUMAN)
    output.console.print("[bold]plain[/bold]", style="red")
    assert text(output.stderr) == "[bold]plain[/bold]\n"


def test_columns_line_up() -> None:
    assert align([("a", "bb", "c"), ("aaa", "b")], header=("x", "", "z")) == [
        "x        z",
        "a    bb  c",
        "aaa  b",
    ]


@pytest.mark.parametrize(
    ("size", "value"),
    [
        ("1", 1),
        ("4096", 4096),
        ("4k", 4096),
        ("4K", 4096),
        ("4KiB", 4096),
        ("4kB", 4000),
        ("1.5M", 3 << 19),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("0.5k", 512),
        ("7B", 7),
    ],
)
def test_sizes(size: str, value: int) -> None:
    assert parse_size(size) == value


@pytest.mark.parametrize(
    "size", ["", "0", "-1", "1.5", "k", "4kk", "4 k b", "1e3", "0x10", "4iB", "inf", "4,096"]
)
def test_what_is_no_size_is_refused(size: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_size(size)


def settings(model: str | None) -> Settings:
    return Settings.from_env({} if model is None else {"TESSERA_MODEL": model})


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the runs: old and new are finished, newest is not."""
    monkeypatch.chdir(tmp_path)
    for created, (name, status) in enumerate(
        [("b-old", "finished"), ("a-new", "finished"), ("c-newest", "failed")]
    ):
        state = {
            "name": name,
            "path": f"runs/{name}",
            "status": status,
            "step": 1,
            "num_steps": 1,
            "created": f"2026-01-0{created + 1}T00:00:00+00:00",
            "layers": [0],
            "fingerprints": {},
            "metrics": {},
            "export": "export",
            "error": None,
            "process": [1, 0.0],
        }
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(state), encoding="utf-8")
    return tmp_path


def test_the_model_is_the_given_one_else_the_variables_else_the_newest_finished_runs(runs: Path) -> None:
    output = sink(OutputMode.HUMAN)
    assert choose_model("a", None, settings("v"), output) == "a"
    assert choose_model(None, "b", settings("v"), output) == "b"
    assert choose_model("a", "a", settings("v"), output) == "a"
    assert text(output.stderr) == ""
    assert choose_model(None, None, settings("v"), output) == "v"
    assert choose_model(None, None, settings(None), output) == "runs/a-new/export"
    assert text(output.stderr) == "using $TESSERA_MODEL v\nusing student runs/a-new/export\n"


def test_two_models_or_none_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="two models"):
        choose_model("a", "b", settings(None), sink(OutputMode.HUMAN))
    with pytest.raises(UsageError, match="no model") as caught:
        choose_model(None, None, settings(None), sink(OutputMode.HUMAN))
    assert "tessera distill init" in str(caught.value.hint)


def test_json_and_quiet_go_together() -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    output = Output(OutputMode.JSON, quiet=True, stdout=stdout, stderr=stderr)
    output.note("loading")
    output.document({"a": 1})
    assert (json.loads(stdout.getvalue()), stderr.getvalue()) == ({"a": 1}, "")
    assert Output.of(json=True, quiet=True).is_quiet
    assert not Output.of(json=True).is_quiet
