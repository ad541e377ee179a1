"""`tessera bench compare`: tables, gates, and files that do not belong together."""

import json
from pathlib import Path
from typing import Any

import pytest

from tessera_cli.cli.app import run
from tessera_cli.errors import ExitCode


def result(concurrency: int, *throughputs: float, digest: str = "a", failed: int = 0) -> dict[str, Any]:
    repeats = [
        {"output_throughput": one, "p99_ttft_ms": 1e5 / one, "failed": failed, "request_goodput": 0.0}
        for one in throughputs
    ]
    return {
        **repeats[0],
        "max_concurrency": concurrency,
        "request_rate": "inf",
        "burstiness": 1.0,
        "output_sha256": digest,
        "repeats": repeats,
        "config": {"prompts_sha256": digest},
    }


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Compares two documents; the exit code, stdout and stderr."""

    def call(before: Any, after: Any, *arguments: str) -> tuple[int, str, str]:
        paths = [tmp_path / "before.json", tmp_path / "after.json"]
        for path, value in zip(paths, (before, after), strict=True):
            path.write_text(value if isinstance(value, str) else json.dumps(value))
        code = run(["bench", "compare", *map(str, paths), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_a_table_has_both_sides_their_ratio_and_its_interval(compare):
    code, out, err = compare(result(8, 100, 104, 96), result(8, 150, 156, 144))
    assert (code, err) == (ExitCode.SUCCESS, "")
    row = next(line for line in out.splitlines() if line.startswith("output_throughput")).split()
    assert row[1:4] == ["100.00", "150.00", "1.500"]
    assert float(row[4]) < 1.5 < float(row[6])
    assert "answers      equal" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_one_document_with_every_figure(compare):
    sweep = {"results": [result(1, 10, 11), result(8, 50, 55)]}
    code, out, _ = compare(sweep, sweep, "--json")
    document = json.loads(out)
    assert code == ExitCode.SUCCESS
    assert [one["max_concurrency"] for one in document["runs"]] == [1, 8]
    for one in document["runs"]:
        assert {figure["ratio"] for figure in one["figures"]} == {1.0}
        assert all(low <= 1 <= high for low, high in (figure["interval"] for figure in one["figures"]))


def test_a_single_repeat_is_told(compare):
    code, out, err = compare(result(8, 100), result(8, 99))
    assert code == ExitCode.SUCCESS
    assert "no interval can be told of a single repeat" in err
    assert out.splitlines()[-1].endswith(" -")


def test_a_regression_is_exit_3_after_the_table(compare):
    slower = result(8, 90, 92)
    code, out, err = compare(result(8, 100, 102), slower, "--fail-below", "0.95", "--json")
    assert code == ExitCode.GATE
    assert json.loads(out)["runs"]
    assert "0.901 of before at 8" in err
    assert compare(result(8, 100, 102), slower, "--fail-below", "0.9")[0] == ExitCode.SUCCESS


def test_different_work_is_refused_unless_allowed(compare):
    pair = result(8, 100, 101), result(8, 100, 101, digest="b")
    code, out, err = compare(*pair)
    assert (code, out) == (ExitCode.USAGE, "")
    assert "different work: other prompts" in err
    code, out, err = compare(*pair, "--allow-different")
    assert code == ExitCode.SUCCESS
    assert "warning: different work" in err
    sweeps = {"results": [result(1, 5), result(8, 5)]}, {"results": [result(8, 5), result(64, 5)]}
    code, _, err = compare(*sweeps)
    assert (code, "concurrency 1, 8 and 8, 64" in err) == (ExitCode.USAGE, True)
    assert compare(*sweeps, "--allow-different")[1].count("concurrency ") == 1


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("{", "not JSON"),
        ("[]", "no benchmark result"),
        ({"results": []}, "no benchmark result"),
        ({"results": [3]}, "a valid dictionary"),
        ({}, "`output_throughput`: field required"),
        ({"output_throughput": "fast"}, "`output_throughput`"),
        ({"output_throughput": float("nan")}, "`output_throughput`"),
        ({"output_throughput": -5.0}, "`output_throughput`"),
        ({"output_throughput": 0.0}, "without output"),
        ({"output_throughput": True}, "`output_throughput`"),
        (result(8, 100) | {"p99_ttft_ms": "slow"}, "`p99_ttft_ms`"),
        (result(8, 100) | {"failed": "2"}, "`failed`"),
        (result(8, 100) | {"repeats": None}, "`repeats`"),
        (result(8, 100) | {"repeats": [3]}, "`repeats.0`"),
        (
            result(8, 100) | {"repeats": [{"output_throughput": float("inf")}]},
            "`repeats.0.output_throughput`",
        ),
        (result(8, 100) | {"config": None}, "`config`"),
        (result(8, 100) | {"max_concurrency": [8]}, "`max_concurrency`"),
        (result(8, 100, failed=2), "requests failed"),
    ],
)
def test_what_is_no_result_is_refused(compare, document: Any, says: str):
    code, _, err = compare(result(8, 100), document)
    assert (code, says in err) == (ExitCode.USAGE, True)


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == ExitCode.USAGE
    assert "a.json cannot be read" in capsys.readouterr().err


def test_what_the_benchmark_writes_can_be_compared(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "a.json"
    sizes = ["--num-blocks", "64", "--input-len", "4", "--output-len", "3", "--num-prompts", "2"]
    options = [*sizes, "--concurrency", "1,2", "--repeat", "2", "--goodput", "ttft:1e6", "-o", str(path)]
    assert run(["bench", str(tiny_model_dir), *options]) == ExitCode.SUCCESS
    capsys.readouterr()
    assert run(["bench", "compare", str(path), str(path)]) == ExitCode.SUCCESS
    shown = capsys.readouterr()
    assert shown.out.count("answers      equal") == 2
    assert shown.out.count("request_goodput") == 2
