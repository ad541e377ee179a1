"""What state a run is in, told by its run.json; reading it loads nothing heavy."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import TypeAdapter, ValidationError

from tessera_cli.errors import UsageError
from tessera_cli.recipe.loader import LoadedRecipe

Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True)
class RunStatus:
    """State of a run, as run.json has it.

    `layers` are the teacher's layers that the student started with; `fingerprints` are hashes of what the
    run reads; `metrics` has the figures of the first and the latest evaluation ("start", "latest") and of
    the latest optimiser step ("train"); `error` is the cause of a failure; `process` is (id, start time) of
    who runs it.
    """

    name: str
    path: Path
    status: Status
    step: int
    num_steps: int
    created: str
    layers: tuple[int, ...] | None
    fingerprints: dict[str, str]
    metrics: dict[str, dict[str, Any]]
    export: Path | None
    error: str | None
    process: tuple[int, float]

    @property
    def is_unfinished(self) -> bool:
        """Whether there is something to resume."""
        return self.status in ("interrupted", "failed")

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the same names, for JSON."""
        return asdict(self) | {"path": str(self.path), "export": str(self.export) if self.export else None}


def read_run(run_dir: Path) -> RunStatus:
    """The state of the run in `run_dir`; one whose process is gone counts as interrupted.

    Raises:
        UsageError: there is no run, or its run.json is not one.
    """
    file = run_dir / "run.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{run_dir} holds no run", hint="`tessera distill show` lists the runs") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    try:
        status = TypeAdapter(RunStatus).validate_python(raw | {"path": run_dir})
    except (TypeError, ValidationError) as error:
        raise UsageError(f"{file} is not the state of a run that this version of Tessera wrote") from error
    if status.export is not None:
        status = replace(status, export=run_dir / status.export)
    gone = status.status == "running" and not _is_alive(status.process)
    return replace(status, status="interrupted") if gone else status


def list_runs(root: Path) -> list[RunStatus]:
    """The runs directly under `root`, the newest last; what is not a run is passed over."""
    runs = []
    for file in root.glob("*/run.json"):
        try:
            runs.append(read_run(file.parent))
        except UsageError:
            continue
    return sorted(runs, key=lambda run: run.created)


def latest_unfinished(root: Path, recipe: LoadedRecipe) -> RunStatus | None:
    """The newest run under `root` of a recipe of this name that can be resumed."""
    runs = [run for run in list_runs(root) if run.name == recipe.recipe.name and run.is_unfinished]
    return runs[-1] if runs else None


def _is_alive(process: tuple[int, float]) -> bool:
    pid, started = process
    try:
        found = psutil.Process(pid)
        # The same id with another start time is another process; one that nobody has reaped is dead as well.
        same = abs(found.create_time() - started) < 1.0
        return same and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
