"""Runs as a page of Markdown with a plot: `python -m benchmarks.peers.page PAGE.md RUN.json ...`."""

import json
import sys
from datetime import date
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.peers.figures import BASE, Figures, Row

TITLES = {
    "mixed": "128 requests of mixed lengths, 64 at once",
    "single": "8 requests, one at a time",
    "prefix": "64 requests at once on one prefix of 512 tokens, nothing cached",
    "prefix-warm": "64 requests at once on one prefix of 512 tokens, cached before",
}
FLOAT32 = ("f32", "F32", "fp32", "float32")


def tables(runs: list[Figures]) -> str:
    """A section in Markdown for each run and workload: how we stand, and a table, fastest first."""
    return "\n\n".join(_section(run, rows) for run in runs for rows in _by_workload(run))


def write_page(path: Path, runs: list[Figures]) -> None:
    """Write the page, and its plot beside it with the suffix `.svg`."""
    plot = path.with_suffix(".svg")
    _plot(plot, runs)
    versions = {name: version for run in runs for name, version in run.versions.items()}
    path.write_text(
        f"# Beside other engines\n\n"
        f"Written by `python -m benchmarks.peers.page` on {date.today()}, from runs of `python -m\n"
        f"benchmarks.peers` on {runs[0].machine}. The engines take turns in each\n"
        f"round, alone, answer greedily and in full, and get the same token ids. llama.cpp is driven over\n"
        f"loopback, the others in their process.\n\n"
        f"Versions: {', '.join(f'{name}: {version}' for name, version in versions.items())}.\n\n"
        f"![Output tokens per second of each engine]({plot.name})\n\n"
        f"{tables(runs)}\n"
    )


def _by_workload(run: Figures) -> list[list[Row]]:
    names = dict.fromkeys(row.workload for row in run.rows)
    return [[row for row in run.rows if row.workload == name] for name in names]


def _section(run: Figures, rows: list[Row]) -> str:
    ours = list(rows[0].over)
    heads = ["engine", "output tok/s", *(f"{our.removeprefix('tessera ')} ÷ it" for our in ours)]
    heads += ["TTFT ms", "TPOT ms", "peak RSS MB", "same answers"]
    rounds = "One round." if run.rounds == 1 else f"Medians of {run.rounds} rounds, and their range."
    lines = [f"## {TITLES[rows[0].workload].capitalize()}", "", *_verdicts(rows), "", rounds, ""]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in sorted(rows, key=lambda row: -row.output_throughput):
        cells = [f"**{row.engine}**" if row.engine in ours else row.engine]
        cells += [f"{row.output_throughput:.1f} ({row.lowest:.1f}–{row.highest:.1f})"]
        cells += [f"{row.over[our]:.2f}" for our in ours]
        cells += [f"{row.mean_ttft_ms:,.0f}", f"{row.mean_tpot_ms:.1f}", f"{row.peak_rss_mb:,.0f}"]
        cells += ["" if row.engine == BASE else f"{row.same_answers:.0%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _verdicts(rows: list[Row]) -> list[str]:
    """How each of Tessera's precisions stands beside the fastest rival, ahead or not."""
    rivals = [row for row in rows if not row.engine.startswith("tessera")]
    lines = []
    for our in rows[0].over:
        comparable = [row for row in rivals if our != BASE or row.engine.endswith(FLOAT32)]
        if comparable:
            best = max(comparable, key=lambda row: row.output_throughput)
            ratio = best.over[our]
            word = "ahead of" if ratio >= 1.02 else "behind" if ratio <= 0.98 else "level with"
            kind = "float32 rival" if our == BASE else "rival in any precision"
            lines.append(f"- {our} is {word} the fastest {kind}, {best.engine}: {ratio:.2f} ×")
    return lines


def _plot(path: Path, runs: list[Figures]) -> None:
    """Bars of output tokens per second, a panel for each run and workload."""
    panels = [rows for run in runs for rows in _by_workload(run)]
    with rc_context({"svg.hashsalt": "peers", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, sum(0.9 + 0.27 * len(rows) for rows in panels)), layout="constrained")
        ratios = [len(rows) + 1 for rows in panels]
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=ratios)[:, 0]
        for axis, rows in zip(axes, panels, strict=True):
            bars = sorted(rows, key=lambda row: row.output_throughput)
            speeds = [row.output_throughput for row in bars]
            spread = [[row.output_throughput - row.lowest for row in bars]]
            spread += [[row.highest - row.output_throughput for row in bars]]
            colours = ["tab:blue" if row.engine.startswith("tessera") else "silver" for row in bars]
            drawn = axis.barh([row.engine for row in bars], speeds, xerr=spread, color=colours)
            axis.bar_label(drawn, fmt="%.0f", padding=3)
            axis.set_title(TITLES[rows[0].workload], loc="left", fontsize="medium")
            axis.spines[["top", "right"]].set_visible(False)
        axes[-1].set_xlabel("output tokens per second")
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    page, *files = map(Path, sys.argv[1:])
    found = [json.loads(file.read_text()) for file in files]
    write_page(page, [Figures(**run | {"rows": [Row(**row) for row in run["rows"]]}) for run in found])


if __name__ == "__main__":
    main()
