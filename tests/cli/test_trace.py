"""`tessera trace`: a readable account, one request's way, trace events, and what is refused."""

import json
from pathlib import Path

import pytest

from tessera_cli.cli.app import run
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.trace import header
from tessera_cli.errors import ExitCode


def line(step: int, scheduled: list, **changes: object) -> dict:
    fields = {
        "step": step,
        "time": step * 0.5,
        "scheduled": scheduled,
        "block_copies": [],
        "preempted": [],
        "finished": [],
        "pool": {"used": 3, "cached": 1, "free": 4},
        "running": 2,
        "waiting": 0,
        "timings": {"schedule": 0.1, "run": 0.3, "commit": 0.1},
    }
    return fields | changes


STEPS = [
    line(1, [["a", 0, 0, 8, 1, 2], ["b", 0, 0, 8, 2, 2]], pool={"used": 4, "cached": 0, "free": 4}),
    line(2, [["a", 0, 8, 1, 1, 3], ["b", 0, 8, 1, 1, 3]], preempted=[["b", 1]], block_copies=[[2, 5]]),
    line(3, [["a", 0, 9, 1, 1, 3], ["b", 1, 4, 5, 1, 3]], finished=[["b", 0, "abort"], ["a", 0, "stop"]]),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.trace"
    first = header(EngineConfig(num_blocks=9, max_model_len=16, block_size=4))
    path.write_text("".join(json.dumps(record) + "\n" for record in [first, *STEPS]))
    return path


@pytest.fixture
def tessera(file: Path, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["trace", str(file), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_trace_events_never_replace_the_trace(tessera, file: Path):
    before = file.read_text()
    code, _, err = tessera("--chrome", str(file))
    assert code == ExitCode.USAGE
    assert "would be overwritten" in err
    assert file.read_text() == before


def test_the_summary_has_steps_peaks_and_the_price_of_each_preemption(tessera):
    code, out, err = tessera()
    assert (code, err) == (ExitCode.SUCCESS, "")
    assert "3 in 1.50 s" in out
    assert "schedule 0.30 s, run 0.90 s, commit 0.30 s" in out
    assert "peak 4 of 8 (50.0%) in step 1" in out
    assert "step 2  b[1]  4 of 8 tokens again  KV blocks ran short" in out
    assert "9-16         1      ####" in out
    assert "1 abort, 1 stop" in out


def test_one_request_is_followed_through_its_steps(tessera):
    _, out, _ = tessera("--request", "b")
    rows = [row.split() for row in out.splitlines()[1:5]]
    assert [row[3] for row in rows] == ["b", "b[1]", "b", "b[1]"]
    assert "preempted" in rows[1]
    assert "a " not in out
    assert "b[1]: steps 1 to 3, 5 tokens computed, 0 cached, 2 sampled, 1 preemptions, unfinished" in out


def test_every_step_is_a_row_when_asked_for(tessera):
    _, out, _ = tessera("--steps")
    assert [row.split()[0] for row in out.splitlines()[:4]] == ["step", "1", "2", "3"]
    assert "preempted b[1]" in out.splitlines()[2]


def test_json_has_the_same_figures_in_one_document(tessera):
    figures = json.loads(tessera("--json")[1])
    assert (figures["num_steps"], figures["num_scheduled_tokens"], figures["num_blocks"]) == (3, 24, 8)
    assert figures["preemptions"][0]["num_recomputed_tokens"] == 4
    assert set(figures["sequences"]) == {"a", "b", "b[1]"}
    only = json.loads(tessera("--json", "--request", "a")[1])
    assert (set(only["sequences"]), only["preemptions"]) == ({"a"}, [])


def test_chrome_events_are_written_to_a_file(tessera, tmp_path: Path):
    target = tmp_path / "chrome.json"
    code, _, err = tessera("--chrome", str(target))
    assert (code, "perfetto" in err) == (ExitCode.SUCCESS, True)
    assert json.loads(target.read_text())["traceEvents"]


def test_what_a_crash_left_is_read_and_told(tessera, file: Path):
    file.write_text(file.read_text()[:-9])
    code, out, err = tessera()
    assert (code, out.splitlines()[0].split()[1]) == (ExitCode.SUCCESS, "2")
    assert f"{file}:4: the last line is unfinished" in err


def test_mistakes_are_one_message(tessera, file: Path):
    code, out, err = tessera("--request", "c")
    assert (code, out) == (ExitCode.USAGE, "")
    assert "no request 'c'" in err
    assert "a, b" in err
    file.write_text(file.read_text().replace('"step": 2', '"stop": 2'))
    code, _, err = tessera()
    assert (code, f"{file}:3: not a step of a trace (no 'step')" in err) == (ExitCode.USAGE, True)
