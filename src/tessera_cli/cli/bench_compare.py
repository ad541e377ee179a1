"""`tessera bench compare`: two results beside each other."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera_cli.cli import options
from tessera_cli.cli.output import Output
from tessera_cli.errors import GateError, UsageError

if TYPE_CHECKING:
    from tessera_cli.serving.comparison import ComparedFigure, ComparedRuns


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A result, as JSON.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Another, of the same requests.")],
    allow_different: Annotated[
        bool, typer.Option("--allow-different", help="Compare also where different work was asked for.")
    ] = False,
    fail_below: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="RATIO",
            help="Exit status 3 if AFTER's output throughput is less than this share of BEFORE's.",
            show_default=False,
        ),
    ] = None,
    json_output: options.JsonOption = False,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Compare two results of `tessera bench -o FILE.json`.

    \b
      tessera bench --repeat 5 -o before.json
      tessera bench compare before.json after.json --fail-below 0.95

    Every figure is the mean of a file's repeats, the ratio is AFTER over BEFORE, and its 95 % interval is a
    bootstrap over repeats: with --repeat 1 there is none. Files of different requests are refused. What
    `vllm bench serve --save-result` wrote does not say what was asked: --allow-different takes it.
    """
    output = Output.of(json=json_output, quiet=quiet)
    from tessera_cli.serving.comparison import compare_runs, differences, read_results

    pairs = _pairs(read_results(before), read_results(after), allow_different)
    found = [f"{what}" for pair in pairs for what in differences(*pair)]
    if found and not allow_different:
        raise UsageError(
            f"different work: {'; '.join(dict.fromkeys(found))}",
            hint="measure the same requests, or give --allow-different",
        )
    compared = [compare_runs(*pair) for pair in pairs]
    output.document({"before": str(before), "after": str(after), "runs": [asdict(one) for one in compared]})
    output.data("\n\n".join("\n".join(_block(one)) for one in compared))
    for what in dict.fromkeys(found):
        output.warning(f"different work: {what}")
    if any(min(one.num_repeats) < 2 for one in compared):
        output.note("note: no interval can be told of a single repeat; measure with --repeat 5")
    misses = [
        f"output throughput is {one.throughput_ratio:.3f} of before at {_where(one)}"
        for one in compared
        if fail_below is not None and one.throughput_ratio < fail_below
    ]
    if misses:
        raise GateError(f"{'; '.join(misses)}, and at least {fail_below:g} is asked for")


def _pairs(
    before: list[dict[str, Any]], after: list[dict[str, Any]], allow_different: bool
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The runs that belong together: single ones, else those of equal concurrency."""
    if len(before) == len(after) == 1:
        return [(before[0], after[0])]
    sides = [{run.get("max_concurrency"): run for run in runs} for runs in (before, after)]
    shared = [level for level in sides[0] if level in sides[1]]
    if not shared or (len(shared) < max(map(len, sides)) and not allow_different):
        lists = [", ".join(map(str, side)) for side in sides]
        raise UsageError(
            f"the sweeps differ: concurrency {lists[0]} and {lists[1]}",
            hint="give --allow-different to compare what both have" if shared else "measure the same ones",
        )
    return [(sides[0][level], sides[1][level]) for level in shared]


def _block(compared: "ComparedRuns") -> list[str]:
    answers = {True: "equal", False: "different", None: "unknown"}[compared.same_output]
    repeats = " and ".join(map(str, compared.num_repeats))
    lines = [
        f"concurrency  {_where(compared)}",
        f"repeats      {repeats}",
        f"answers      {answers}",
        f"{'':<24}{'before':>12}{'after':>12}{'ratio':>8}  95 % interval",
    ]
    return lines + [_row(figure) for figure in compared.figures]


def _row(figure: "ComparedFigure") -> str:
    interval = "-" if figure.interval is None else "{:.3f} to {:.3f}".format(*figure.interval)
    return f"{figure.name:<24}{figure.before:>12,.2f}{figure.after:>12,.2f}{figure.ratio:>8.3f}  {interval}"


def _where(compared: "ComparedRuns") -> str:
    return str(compared.max_concurrency or "unlimited")
