"""`--plot`: throughput against latency over the concurrencies of a sweep."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_cli.cli.bench_run import BenchRun
from tessera_cli.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg")
LATENCIES = ("ttft", "tpot")


def plot_format(path: Path) -> str:
    """The image format that a file's suffix means.

    Raises:
        UsageError: none that is drawn.
    """
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(f"{path}: the suffix says no image format", hint=f"use {' or '.join(FORMATS)}")
    return suffix[1:]


def plot_runs(runs: Sequence[BenchRun], form: str) -> bytes:
    """The image: a panel each for TTFT and TPOT, a point for each concurrency, p50 and p99."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A figure of its own touches no display and no state of pyplot's; equal runs give equal files.
    figure = Figure(figsize=(9, 4), layout="constrained")
    with rc_context({"svg.hashsalt": "tessera", "svg.fonttype": "none"}):
        for axes, metric in zip(figure.subplots(1, len(LATENCIES)), LATENCIES, strict=True):
            _panel(axes, runs, metric)
        figure.suptitle(_title(runs[0].about))
        target = BytesIO()
        figure.savefig(target, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return target.getvalue()


def _panel(axes: "Axes", runs: Sequence[BenchRun], metric: str) -> None:
    for percent, style in ((50, "o-"), (99, "s--")):
        points = [(run, run.result.percentile_ms(metric, percent)) for run in runs]
        drawn = [(run, value) for run, value in points if value is not None]
        axes.plot(
            [value for _, value in drawn],
            [run.result.output_throughput for run, _ in drawn],
            style,
            label=f"p{percent}",
        )
        if percent == 50:
            for run, value in drawn:
                axes.annotate(
                    str(run.concurrency or "unlimited"),
                    (value, run.result.output_throughput),
                    xytext=(5, -11),
                    textcoords="offset points",
                    fontsize="small",
                )
    axes.set_xlabel(f"{metric.upper()}, ms")
    axes.set_ylabel("output tokens/s")
    for scale, margin in ((axes.set_xlim, axes.get_xlim()[1]), (axes.set_ylim, axes.get_ylim()[1])):
        scale(0, 1.1 * margin)
    axes.grid(alpha=0.3)
    axes.legend(title="labels: concurrency", loc="lower right", fontsize="small", title_fontsize="small")


def _title(about: dict[str, Any]) -> str:
    config = about["config"]
    name = Path(str(about["model_id"]))
    model = name.parent.name if name.name == "export" else name.name
    lengths = ""
    if config["input_len"] is not None:
        lengths = f", {config['input_len']:,} tokens in, {config['output_len']:,} out"
    return f"{model}{lengths}, {config['dataset']} requests"
