"""What distillation is worth: the same student trained on the same tokens in three ways, in one run.

python -m benchmarks.distill_worth [--tokens 40000] [--recipe FILE] [-o DIRECTORY] [KEY=VALUE ...]

Half of the teacher's layers, evenly spread, learn from the teacher's distribution (KD) and from the documents
alone (CE); a student of the same shape with random weights learns from the teacher as the first does. Writes
the table into its section of results.md, and worth.svg with the curves, into the directory of -o. The default
takes about a quarter of an hour on two quiet cores.
"""

import argparse
import dataclasses
import io
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.results_page import write_section
from tessera_cli import __version__
from tessera_cli.distill.events import Evaluated, Event, StageStarted, TrainStep
from tessera_cli.distill.pipeline import run_recipe
from tessera_cli.distill.plan import plan_recipe
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.source import resolve_model
from tessera_cli.recipe.loader import load_recipe
from tessera_cli.settings import Settings, prepare_process

NUM_EVALUATIONS = 8


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train: its name in the table, what it changes in the recipe, its color in the drawing."""

    name: str
    overrides: tuple[str, ...]
    color: str


@dataclasses.dataclass
class Outcome:
    """What came of a way: tokens trained on at each evaluation, and the seconds of all optimiser steps."""

    way: Way
    tokens: list[int]
    evaluations: list[Evaluated]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description="KD against CE against a random start, at the same tokens.")
    parser.add_argument("--tokens", type=int, default=40_000, help="tokens that each student sees")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("-o", "--output-dir", type=Path, default=Path("docs"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    settings = Settings.from_env()
    prepare_process(offline=True)
    name = load_recipe(options.recipe, options.overrides).recipe.teacher.model
    teacher = ModelConfig.from_dir(resolve_model(name, home=settings.home, offline=True))
    outcomes = [train(way, options, settings.home) for way in ways(teacher.num_hidden_layers // 2)]
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "worth.svg").write_text(draw(outcomes), encoding="utf-8")
    page = tell(outcomes, options, name, teacher)
    write_section(options.output_dir / "results.md", "What distillation is worth", page)
    print(page)


def ways(num_layers: int) -> list[Way]:
    """Half of the teacher twice, and once its shape alone."""
    half = f"student={{init: teacher_layers, layers: even, num_hidden_layers: {num_layers}}}"
    shape = f"student={{init: config, num_hidden_layers: {num_layers}}}"
    ce = ("loss.kd_weight=0", "loss.ce_weight=1")
    return [
        Way("KD, from the teacher's layers", (half,), "#d1495b"),
        Way("CE alone, from the teacher's layers", (half, *ce), "#6b93c9"),
        Way("KD, from random weights", (shape,), "#8a8a8a"),
    ]


def train(way: Way, options: argparse.Namespace, home: Path) -> Outcome:
    """Train as `way` says, in a directory that is thrown away."""
    budget = ["train.max_steps=null", "train.num_epochs=null", f"train.max_tokens={options.tokens}"]
    overrides = [*budget, "checkpoint.every=1000000", *way.overrides, *options.overrides]
    num_steps = plan_recipe(load_recipe(options.recipe, overrides), home=home, offline=True).num_steps
    every = f"eval.every={max(1, num_steps // NUM_EVALUATIONS)}"
    outcome = Outcome(way, [], [], 0.0)
    tokens = 0

    def listener(event: Event) -> None:
        nonlocal tokens
        if isinstance(event, TrainStep):
            tokens = event.tokens
            outcome.seconds += event.step_seconds
        elif isinstance(event, Evaluated):
            outcome.tokens.append(tokens)
            outcome.evaluations.append(event)
            print(f"{way.name}: {tokens:,} tokens, held-out KL {event.kl:.4f}", file=sys.stderr, flush=True)
        elif isinstance(event, StageStarted) and event.name == "export":
            raise _TrainedError

    with tempfile.TemporaryDirectory() as directory, suppress(_TrainedError):
        run_recipe(
            load_recipe(options.recipe, [*overrides, every]),
            run_dir=Path(directory) / "run",
            listener=listener,
            resume=False,
            overwrite=False,
            device="auto",
            offline=True,
            home=home,
        )
    return outcome


class _TrainedError(Exception):
    """Ends a run whose figures are all there: neither its export nor its report is wanted."""


def draw(outcomes: Sequence[Outcome]) -> str:
    """Held-out KL over tokens, an SVG."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for outcome in outcomes:
        kl = [evaluation.kl for evaluation in outcome.evaluations]
        axes.plot(outcome.tokens, kl, marker="o", color=outcome.way.color, label=outcome.way.name)
    axes.set_xlabel("tokens through the student")
    axes.set_ylabel("held-out KL(teacher ‖ student), nats/token")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    svg = io.StringIO()
    with rc_context({"svg.hashsalt": "worth"}):
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()


def tell(outcomes: Sequence[Outcome], options: argparse.Namespace, name: str, teacher: ModelConfig) -> str:
    """The section."""
    last, depth = outcomes[0].evaluations[-1], teacher.num_hidden_layers
    header = ("student", "KL before", "KL", "perplexity", "top-1", "top-5", "acceptance", "training")
    rows = [header, ("---",) * len(header), *map(row, outcomes)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
    words = ["python -m benchmarks.distill_worth", f"--tokens {options.tokens}", *options.overrides]
    return f"""The same student, {depth // 2} of the {depth} layers of `{name}`,
on the same {outcomes[0].tokens[-1]:,} tokens in the same order, in three ways: KD learns the teacher's
distribution, CE the documents alone. Measured on {last.num_tokens:,} held-out tokens that the teacher wrote;
its own perplexity there is {last.teacher_perplexity:.2f}.

{table}

![held-out KL over tokens](worth.svg)

Tessera {__version__}, torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads, \
{datetime.now(UTC):%Y-%m-%d}. This section is what the command writes:

```bash
{" ".join(words)}
```
"""


def row(outcome: Outcome) -> tuple[str, ...]:
    """A line of the table."""
    start, end = outcome.evaluations[0], outcome.evaluations[-1]
    return (
        outcome.way.name,
        f"{start.kl:.3f}",
        f"{end.kl:.3f}",
        f"{end.student_perplexity:,.1f}",
        f"{end.top1_agreement:.1%}",
        f"{end.top5_agreement:.1%}",
        f"{end.acceptance:.1%}",
        f"{outcome.seconds:,.0f} s",
    )


if __name__ == "__main__":
    main()
