"""Tasks of the lm-evaluation-harness for one model; nothing of the harness is imported before it is asked."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tessera_cli.errors import UsageError

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager


def find_tasks(tasks: Sequence[str], task_dir: Path | None) -> "TaskManager":
    """What knows these tasks, of `task_dir` or of the harness; before any model is loaded.

    Raises:
        UsageError: the harness is not installed, there is no such directory, a task is unknown, or the
            harness cannot load one, its documents included.
    """
    if find_spec("lm_eval") is None:
        raise UsageError("--tasks needs the lm-evaluation-harness", hint="pip install 'tessera-cli[lm-eval]'")
    manager = _manager(tasks, task_dir)
    try:
        manager.load(list(tasks))
    except Exception as error:  # a task is code and documents of anybody's
        reason = (str(error).splitlines() or [""])[0]
        raise UsageError(
            f"{', '.join(tasks)} cannot be loaded: {type(error).__name__}: {reason}",
            hint="check the task's file and its dataset; offline, only what was downloaded before is there",
        ) from error
    return manager


def run_tasks(
    model: Path, tasks: Sequence[str], manager: "TaskManager", *, limit: int | None, device: str
) -> dict[str, dict[str, float]]:
    """The figures of `model` in each task by the names that the harness has for them.

    `limit` is the number of examples of a task. A figure of a filter other than "none" has it in its name.
    """
    from lm_eval import simple_evaluate

    from tessera_cli.serving.lm_eval_model import TesseraLM

    results = simple_evaluate(
        model=TesseraLM(str(model), device=device),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        log_samples=False,
    )
    return {task: _figures(figures) for task, figures in results["results"].items()}


def _manager(tasks: Sequence[str], task_dir: Path | None) -> "TaskManager":
    from lm_eval.tasks import TaskManager

    if task_dir is not None:
        if not task_dir.is_dir():
            raise UsageError(f"no such directory of tasks: {task_dir}")
        # The harness's own are thousands of files: they are read only where one of them is meant.
        manager = TaskManager(include_path=str(task_dir), include_defaults=False)
        if not _unknown(tasks, manager):
            return manager
    manager = TaskManager(include_path=None if task_dir is None else str(task_dir))
    if unknown := _unknown(tasks, manager):
        raise UsageError(
            f"no such task: {', '.join(unknown)}", hint="`lm_eval ls tasks` lists them; --task-dir adds more"
        )
    return manager


def _unknown(tasks: Sequence[str], manager: "TaskManager") -> list[str]:
    return [task for task in tasks if not manager.match_tasks([task])]


def _figures(raw: dict[str, Any]) -> dict[str, float]:
    figures = {}
    for key, value in raw.items():
        name, comma, kind = key.partition(",")
        if comma and isinstance(value, int | float):
            figures[name if kind == "none" else f"{name} ({kind})"] = float(value)
    return figures
