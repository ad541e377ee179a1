"""`tessera distill eval`: a student against its teacher, held to bounds, and on tasks."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from tessera_cli.cli import options
from tessera_cli.cli.evaluation_view import evaluation_rows, missed_gates, speculative_line, task_rows
from tessera_cli.cli.output import Output
from tessera_cli.errors import GateError, UsageError
from tessera_cli.settings import Settings, prepare_process

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from tessera_cli.distill.evaluation.measured import Measured

PAIR = "Instead of RUN"


def _bound(help_text: str, metavar: str, most: float | None = None) -> Any:
    return typer.Option(min=0, max=most, metavar=metavar, help=help_text, show_default=False)


def evaluate(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run directory.", show_default=False)
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(metavar="MODEL", help=f"{PAIR}: any model.", show_default=False)
    ] = None,
    student: Annotated[
        str | None, typer.Option(metavar="MODEL", help=f"{PAIR}: any model.", show_default=False)
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help=f"{PAIR}: .jsonl, .parquet or .txt; may be repeated.", show_default=False
        ),
    ] = None,
    data_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="text|messages|prompt_completion",
            help="What a document of --data looks like.",
            show_default=False,
        ),
    ] = None,
    train_on: Annotated[
        str | None,
        typer.Option(
            metavar="completion|all",
            help="Which tokens of --data are measured. [default: completion]",
            show_default=False,
        ),
    ] = None,
    max_seq_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="TOKENS",
            help="Longer documents of --data are left out. [default: 1024]",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            help="Most held-out tokens. [default: the recipe's, else 65536]",
            show_default=False,
        ),
    ] = None,
    max_kl: Annotated[float | None, _bound("Exit 3 above it.", "NATS")] = None,
    max_perplexity: Annotated[float | None, _bound("Exit 3 above it.", "PPL")] = None,
    min_agreement: Annotated[float | None, _bound("Exit 3 below it, at top 1.", "SHARE", 1)] = None,
    min_agreement_5: Annotated[float | None, _bound("Exit 3 below it, at top 5.", "SHARE", 1)] = None,
    min_acceptance: Annotated[float | None, _bound("Exit 3 below it.", "SHARE", 1)] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="TASK[,TASK]",
            help="Tasks of lm-evaluation-harness, of teacher and student.",
            show_default=False,
        ),
    ] = None,
    task_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where more tasks are, as YAML.", show_default=False),
    ] = None,
    task_limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Examples of a task. [default: all]", show_default=False),
    ] = None,
    device: options.DeviceOption = "auto",
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Measure a student against its teacher on held-out documents.

    \b
    tessera distill eval runs/RUN --max-kl 0.9 --min-acceptance 0.5
    tessera distill eval --teacher BIG --student SMALL --data held-out.jsonl
    tessera distill eval runs/RUN --tasks hellaswag,arc_easy
    """
    output = Output.of(json=json, quiet=quiet)
    settings = Settings.from_env()
    settings = replace(settings, offline=offline or settings.offline)
    prepare_process(offline=settings.offline)
    if tasks is None and (task_dir or task_limit):
        raise UsageError("--task-dir and --task-limit are about tasks", hint="name them with --tasks")
    if tasks is not None:
        from tessera_cli.serving.lm_eval_tasks import find_tasks

        names = [name.strip() for name in tasks.split(",")]
        manager = find_tasks(names, task_dir)
    pair = {"teacher": teacher, "student": student, "data": data, "format": data_format}
    common = {"device": device, "home": settings.home, "offline": settings.offline}
    if run_dir is not None:
        _refuse(pair | {"train_on": train_on, "max_seq_len": max_seq_len})
        measured = _of_run(run_dir, output, limit=limit, **common)
    else:
        if missing := [f"--{name}" for name, value in pair.items() if not value]:
            raise UsageError(
                f"neither a RUN nor {', '.join(missing)}",
                hint="name a run directory, or give all of --teacher, --student, --data and --format",
            )
        measured = _of_pair(
            pair,
            output,
            limit=limit or 65_536,
            max_seq_len=max_seq_len or 1024,
            train_on=train_on or "completion",
            **common,
        )
    document = measured.as_dict()
    if tasks is not None:
        document["tasks"] = _run_tasks(measured, names, manager, task_limit, device)
    _tell(document, output)
    bounds = {
        "max_kl": max_kl,
        "max_perplexity": max_perplexity,
        "min_agreement": min_agreement,
        "min_agreement_5": min_agreement_5,
        "min_acceptance": min_acceptance,
    }
    if missed := missed_gates(document["student"], bounds):
        raise GateError("; ".join(missed))


def _refuse(pair: dict[str, Any]) -> None:
    if given := [f"--{name.replace('_', '-')}" for name, value in pair.items() if value]:
        raise UsageError(
            f"a run has its own models and documents: no use for {', '.join(given)}",
            hint="leave RUN out to measure any two models",
        )


def _of_run(run_dir: Path, output: Output, **arguments: Any) -> "Measured":
    from tessera_cli.distill.evaluation.finished_run import evaluate_run
    from tessera_cli.distill.events import Event, Note

    def listener(event: Event) -> None:
        if isinstance(event, Note):
            output.note(event.text)

    return evaluate_run(run_dir, listener=listener, **arguments)


def _of_pair(pair: dict[str, Any], output: Output, *, train_on: str, **arguments: Any) -> "Measured":
    from tessera_cli.distill.evaluation.pair import evaluate_pair
    from tessera_cli.recipe.data_section import DataFormat, DataSource

    for name, value, known in (
        ("format", pair["format"], [one for one in get_args(DataFormat) if one != "prompts"]),
        ("train-on", train_on, ("completion", "all")),
    ):
        if value not in known:
            raise UsageError(f"--{name} is {value!r}", hint=f"use {', '.join(known)}")
    sources = [DataSource(path=str(path), format=pair["format"]) for path in pair["data"]]
    return evaluate_pair(
        pair["teacher"],
        pair["student"],
        sources,
        train_on="all" if train_on == "all" else "completion",
        notify=output.note,
        **arguments,
    )


def _run_tasks(
    measured: "Measured", tasks: list[str], manager: "TaskManager", limit: int | None, device: str
) -> dict[str, dict[str, dict[str, float]]]:
    from tessera_cli.serving.lm_eval_tasks import run_tasks

    paths = {"teacher": measured.teacher_path, "student": measured.student_path}
    results = {
        model: run_tasks(path, tasks, manager, limit=limit, device=device) for model, path in paths.items()
    }
    return {
        task: {metric: {model: results[model][task][metric] for model in results} for metric in metrics}
        for task, metrics in results["student"].items()
    }


def _tell(document: dict[str, Any], output: Output) -> None:
    output.document(document)
    for note in document["notes"]:
        output.note(note)
    columns = {name: document[name] for name in ("start", "student") if document[name] is not None}
    output.rows(evaluation_rows(columns), header=("held out", *columns))
    output.data("\n" + speculative_line(document["speculative"]))
    if "tasks" in document:
        output.data("")
        output.rows(task_rows(document["tasks"]), header=("task", "metric", "teacher", "student"))
