"""The page that sets Tessera beside other engines: medians, the right rival, and where Tessera is behind."""

from pathlib import Path

from benchmarks.peers.figures import Figures, rows
from benchmarks.peers.page import tables, write_page


def run(speed: float, tokens: list[list[int]] | None = None) -> dict:
    """A round of 40 output tokens at `speed` tokens per second."""
    answers = tokens or [[1] * 10] * 4
    return {"tokens": answers, "seconds": 40 / speed, "ttft": [0.1, 0.3], "tpot": [0.01], "peak_rss": 2e9}


def figures(**speeds: list[float]) -> Figures:
    """One workload; an engine's name has `_` for spaces."""
    by_peer = {name.replace("_", " "): [run(speed) for speed in each] for name, each in speeds.items()}
    return Figures("a machine", {"a": "1"}, 3, rows({"mixed": by_peer}))


def test_ratios_are_medians_of_the_rounds_own_ratios():
    found = figures(tessera_f32=[100, 50, 10], other_f32=[50, 50, 20])
    other = found.rows[1]
    assert (other.output_throughput, other.lowest, other.highest) == (50, 20, 50)
    assert other.over == {"tessera f32": 1.0}  # of 2, 1 and 0.5
    assert other.mean_ttft_ms == 200


def test_only_equal_precision_is_set_beside_float32():
    text = tables([figures(tessera_f32=[100], tessera_int8=[150], other_f32=[90], other_int8=[200])])
    assert "tessera f32 is ahead of the fastest float32 rival, other f32: 1.11 ×" in text
    assert "tessera int8 is behind the fastest rival in any precision, other int8: 0.75 ×" in text


def test_a_difference_within_the_noise_is_a_tie():
    assert "level with" in tables([figures(tessera_f32=[100], other_f32=[101])])


def test_answers_are_compared_with_those_in_float32():
    theirs = [[1] * 10] * 3 + [[1] * 9 + [2]]
    found = rows({"mixed": {"tessera f32": [run(1)], "other f32": [run(1, theirs)]}})
    assert [row.same_answers for row in found] == [1.0, 0.75]


def test_a_page_has_its_plot_beside_it(tmp_path: Path):
    write_page(tmp_path / "page.md", [figures(tessera_f32=[1], other_f32=[2])] * 2)
    assert "![Output tokens per second of each engine](page.svg)" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "page.svg").read_text().count("128 requests of mixed lengths") == 2
