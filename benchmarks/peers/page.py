"""The benchmark's figures as a page of Markdown with a plot."""

from datetime import date
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.peers.figures import BASE, Figures, Row

TITLES = {
    "mixed": "128 requests of mixed lengths, 64 at once",
    "single": "8 requests, one at a time",
    "prefix": "64 requests at once on one prefix of 512 tokens, nothing cached",
    "prefix-warm": "the same, with the prefix cached before",
}
FLOAT32 = ("f32", "F32", "fp32", "float32")


def tables(rows: list[Row]) -> str:
    """A section in Markdown for each workload: how we stand, and a table, fastest first."""
    return "\n\n".join(_section(name, [row for row in rows if row.workload == name]) for name in _names(rows))


def write_page(path: Path, found: Figures) -> None:
    """Write the page, and its plot beside it with the suffix `.svg`."""
    plot = path.with_suffix(".svg")
    _plot(plot, found.rows)
    versions = ", ".join(f"{name}: {version}" for name, version in found.versions.items())
    rounds = "One round" if found.rounds == 1 else f"Medians of {found.rounds} rounds"
    path.write_text(
        f"# Beside other engines\n\n"
        f"Written by `python -m benchmarks.peers --page {path.name}` on {date.today()}. {rounds} of\n"
        f"{found.machine}; every engine has these cores to itself while it runs, answers greedily\n"
        f"and in full, and gets the same token ids. llama.cpp is driven over loopback, the others in their\n"
        f"process.\n\n"
        f"Versions: {versions}.\n\n"
        f"![Output tokens per second of each engine]({plot.name})\n\n"
        f"{tables(found.rows)}\n"
    )


def _names(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.workload for row in rows))


def _section(name: str, rows: list[Row]) -> str:
    ours = list(rows[0].over)
    heads = ["engine", "output tok/s", *(f"{our.removeprefix('tessera ')} ÷ it" for our in ours)]
    heads += ["TTFT ms", "TPOT ms", "peak RSS MB", "same answers"]
    lines = [f"## {TITLES[name].capitalize()}", "", *_verdicts(rows), ""]
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


def _plot(path: Path, rows: list[Row]) -> None:
    """Bars of output tokens per second, a panel for each workload."""
    names = _names(rows)
    with rc_context({"svg.hashsalt": "peers", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 0.9 * len(names) + 0.27 * len(rows)), layout="constrained")
        heights = [sum(row.workload == name for row in rows) + 1 for name in names]
        axes = figure.subplots(len(names), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, name in zip(axes, names, strict=True):
            bars = sorted(
                (row for row in rows if row.workload == name), key=lambda row: row.output_throughput
            )
            speeds = [row.output_throughput for row in bars]
            spread = [[row.output_throughput - row.lowest for row in bars]]
            spread += [[row.highest - row.output_throughput for row in bars]]
            colours = ["tab:blue" if row.engine.startswith("tessera") else "silver" for row in bars]
            drawn = axis.barh([row.engine for row in bars], speeds, xerr=spread, color=colours)
            axis.bar_label(drawn, fmt="%.0f", padding=3)
            axis.set_title(TITLES[name], loc="left", fontsize="medium")
            axis.spines[["top", "right"]].set_visible(False)
        axes[-1].set_xlabel("output tokens per second")
        figure.savefig(path, metadata={"Date": None})
