"""What `tessera distill` prints: a plan, a run, a list of runs, an evaluation; plain lines, 80 columns."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_cli.cli.evaluation_view import evaluation_rows, figure
from tessera_cli.cli.output import Output, align, show
from tessera_cli.settings import Settings

if TYPE_CHECKING:
    from tessera_cli.distill.plan import Plan
    from tessera_cli.distill.runs.run_status import RunStatus
    from tessera_cli.distill.teacher_cache.cost import CacheCost
    from tessera_cli.recipe.loader import LoadedRecipe
    from tessera_cli.recipe.student_section import StudentSection

WIDTH = 80
RUN_COLUMNS = ("run", "status", "step", "KL", "agreement", "student")


def run_header(loaded: "LoadedRecipe", run_dir: Path) -> dict[str, str]:
    """What the training view tells first."""
    recipe = loaded.recipe
    return {
        "run": str(run_dir),
        "teacher": recipe.teacher.model,
        "student": _student_in_words(recipe.student),
        "loss": f"{recipe.loss.kind} at temperature {recipe.loss.temperature:g}",
    }


def _student_in_words(student: "StudentSection") -> str:
    if student.init == "checkpoint":
        return f"from {student.model}"
    layers = student.layers
    depth = len(layers) if isinstance(layers, list) else student.num_hidden_layers
    which = {"config": "random"}.get(student.init, "listed" if isinstance(layers, list) else layers or "")
    narrow = ", narrowed" if student.init == "width" else ""
    return f"{depth or 'all'} layers, {which}".removesuffix(", ") + narrow


def show_plan(loaded: "LoadedRecipe", output: Output, settings: Settings) -> None:
    """Write the plan of a recipe."""
    from tessera_cli.distill.plan import plan_recipe

    result = plan_recipe(loaded, home=settings.home, offline=settings.offline, notify=output.note)
    origins = {key: str(origin) for key, origin in loaded.origins.items()}
    output.document({"recipe": loaded.recipe.model_dump(), "origins": origins, "plan": result.as_dict()})
    for line in plan_lines(loaded, result):
        output.data(line)


def plan_lines(loaded: "LoadedRecipe", plan: "Plan") -> list[str]:
    """The plan as a page: models, documents, steps, cost, and every value that is not the default."""
    teacher, student = plan.teacher, plan.student
    models = [
        ("parameters", _count(teacher.num_parameters), _count(student.num_parameters)),
        ("layers", str(teacher.num_hidden_layers), str(student.num_hidden_layers)),
        ("GFLOP/token", f"{teacher.gflop_per_token:.3g}", f"{student.gflop_per_token:.3g}"),
        ("KV cache/token", _size(teacher.kv_bytes_per_token), _size(student.kv_bytes_per_token)),
    ]
    layers = "the most important, chosen at the start" if plan.layers is None else _series(plan.layers)
    starts = {"config": "random weights", "checkpoint": loaded.recipe.student.model or ""}
    memory = plan.memory
    about = "about " if plan.is_estimate else ""
    total_flop = plan.gflop_per_token * 1e9 * plan.num_tokens
    facts = [
        ("teacher", str(plan.teacher_path)),
        ("layers kept", layers) if plan.layers != () else None,
        ("starts from", starts[init]) if (init := loaded.recipe.student.init) in starts else None,
        ("documents", f"{plan.num_documents:,} to train on, {plan.num_eval_documents:,} held out"),
        ("too long", f"{plan.num_too_long:,} documents are skipped") if plan.num_too_long else None,
        ("training", f"{about}{plan.num_steps:,} steps, {plan.num_epochs:.3g} epochs"),
        ("tokens", f"{about}{plan.num_tokens:,}, of them {plan.num_supervised_tokens:,} supervised"),
        ("on-policy", f"{about}{plan.num_on_policy_steps:,} of the steps train on the student's own answers")
        if loaded.recipe.data.on_policy
        else None,
        ("teacher cache", _cache_in_words(plan.cache)) if plan.cache is not None else None,
        ("compute", f"{plan.gflop_per_token:.3g} GFLOP/token, {total_flop:.2g} FLOP in all"),
        (
            "memory",
            f"{_size(memory.total)} and activations: student {_size(memory.student)}, "
            f"teacher {_size(memory.teacher)}, loss {_size(memory.loss)}"
            + (f", KV cache for answers {_size(memory.answers)}" if memory.answers else ""),
        ),
    ]
    lines = [f"{loaded.path} is a sound recipe for {plan.name!r}", ""]
    lines += align(models, header=("", "teacher", "student"))
    lines += ["", *_facts([fact for fact in facts if fact is not None])]
    for note in plan.notes:
        lines += ["", *textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="  ")]
    return [*lines, "", *_origin_lines(loaded)]


def _cache_in_words(cache: "CacheCost") -> str:
    most = "at most " if cache.kind == "sample" else ""
    return (
        f"{cache.kind}, {most}{_size(cache.train_bytes)} for {cache.num_tokens:,} supervised tokens "
        f"({most}{cache.bytes_per_token:,} bytes each) and {_size(cache.eval_bytes)} for held-out ones; "
        f"{cache.gflop * 1e9:.2g} FLOP of the teacher, once"
    )


def show_run(run_dir: Path, output: Output) -> None:
    """Write the state of the run in `run_dir`."""
    from tessera_cli.distill.runs.run_status import read_run

    status = read_run(run_dir)
    output.document(status.as_dict())
    for line in run_lines(status):
        output.data(line)


def run_lines(run: "RunStatus") -> list[str]:
    """One run: its state, its figures, and where the student is."""
    facts = [
        ("run", str(run.path)),
        ("status", run.status if run.error is None else f"{run.status}: {run.error}"),
        ("step", f"{run.step:,}/{run.num_steps:,}"),
    ]
    lines = _facts(facts)
    if run.metrics.get("latest"):
        figures = {"start": run.metrics.get("start", {}), "student": run.metrics["latest"]}
        lines += ["", *align(evaluation_rows(figures), header=("held out", "start", "student"))]
    if run.export is not None:
        lines += [
            "",
            "student  " + str(run.export),
            "next     tessera generate " + str(run.export) + ' -p "Hello"',
        ]
    elif run.is_unfinished:
        lines += ["", f"`tessera distill run RECIPE -o {run.path} --resume` continues it"]
    return lines


def run_row(run: "RunStatus") -> tuple[str, ...]:
    """A line of the list of runs, for `RUN_COLUMNS`."""
    latest = run.metrics.get("latest", {})
    return (
        str(run.path),
        run.status,
        f"{run.step:,}/{run.num_steps:,}",
        figure(latest, "kl"),
        figure(latest, "top1_agreement"),
        "-" if run.export is None else run.export.name,
    )


def _origin_lines(loaded: "LoadedRecipe") -> list[str]:
    values = loaded.recipe.model_dump()
    rows = [
        (key, show(_at(values, key)), str(origin))
        for key, origin in loaded.origins.items()
        if origin.source != "default"
    ]
    widths = max((len(row[0]) for row in rows), default=0)
    limit = WIDTH - widths - len("  override") - 4
    cut = [
        (key, value if len(value) <= limit else "…" + value[-limit + 1 :], origin)
        for key, value, origin in rows
    ]
    return align(cut, header=("set", "value", "by"))


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[int(part)] if isinstance(values, list) else values[part]
    return values


def _facts(facts: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in facts) + 2
    lines: list[str] = []
    for name, text in facts:
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent=f"{name:<{width}}",
            subsequent_indent=" " * width,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _series(layers: Sequence[int]) -> str:
    return ", ".join(str(layer) for layer in layers)


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.1f} M"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes} B"
