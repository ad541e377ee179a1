"""A run's directory: what is in it, how it is claimed, and what state the run is in.

recipe.yaml     the recipe with every default, origins.json where each value came from
run.json        status, step and figures; replaced as a whole
metrics.jsonl   one line for every optimiser step and evaluation
on_policy.jsonl one line for every answer that the student gave while it trained
checkpoints/    to resume from
export/         the student, as a model directory
report.md       what came out, with curve.png
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from safetensors import SafetensorError

from tessera_cli.distill.events import Evaluated, TrainStep
from tessera_cli.distill.runs.claims import check_available, check_resumable, differences
from tessera_cli.distill.runs.metrics_file import (
    METRICS_FILE,
    metric_record,
    read_metrics,
    read_records,
    without_kind,
)
from tessera_cli.distill.runs.run_status import RunStatus, read_run
from tessera_cli.errors import RunError, UsageError
from tessera_cli.recipe.loader import LoadedRecipe, dump_recipe
from tessera_cli.recipe.schema import Recipe


class RunDirectory:
    """The directory of a run by this process; every file in it is replaced as a whole or only grows.

    Of several processes one writes; the others follow, and keep what they would write to themselves.
    """

    def __init__(self, status: RunStatus, recipe: Recipe, *, follows: bool = False) -> None:
        self.status = status
        self.recipe = recipe
        self._follows = follows

    @classmethod
    def follow(cls, path: Path, recipe: Recipe) -> "RunDirectory":
        """The run that another process claimed.

        Raises:
            UsageError: there is none.
        """
        return cls(read_run(path), recipe, follows=True)

    def refresh(self) -> None:
        """Take over what the process that is followed has recorded."""
        if self._follows:
            self.status = read_run(self.path)

    @classmethod
    def create(
        cls,
        path: Path,
        recipe: LoadedRecipe,
        *,
        num_steps: int,
        fingerprints: dict[str, str],
        overwrite: bool,
    ) -> "RunDirectory":
        """Claim `path` for a new run.

        Raises:
            UsageError: as `check_available`, or the file system refuses.
        """
        check_available(path, overwrite=overwrite)
        try:
            _clear(path)
        except OSError as error:
            raise UsageError(
                f"cannot create {path}: {error.strerror}", hint="choose another --output-dir"
            ) from error
        status = RunStatus(
            name=recipe.recipe.name,
            path=path,
            status="running",
            step=0,
            num_steps=num_steps,
            created=datetime.now(UTC).isoformat(timespec="microseconds"),
            layers=None,
            fingerprints=fingerprints,
            metrics={},
            export=None,
            error=None,
            process=_this_process(),
        )
        run = cls(status, recipe.recipe)
        run.update()  # first: what is cut short from here on can be overwritten
        write_text(path / "recipe.yaml", dump_recipe(recipe.recipe))
        origins = {key: str(origin) for key, origin in recipe.origins.items()}
        write_text(path / "origins.json", json.dumps(origins, indent=2) + "\n")
        return run

    @classmethod
    def reopen(cls, path: Path, recipe: LoadedRecipe, *, fingerprints: dict[str, str]) -> "RunDirectory":
        """Claim the unfinished run in `path` to continue it.

        Raises:
            UsageError: nothing to resume, or something changed since the run began.
        """
        check_resumable(path, recipe.recipe)
        status = read_run(path)
        changed = differences(status.fingerprints, fingerprints)
        if changed:
            raise UsageError(
                f"{path} cannot be resumed: changed since it began: {', '.join(changed)}",
                hint="restore what changed, or start anew with --overwrite or another --output-dir",
            )
        run = cls(status, recipe.recipe)
        run.update(status="running", error=None, process=_this_process())
        return run

    @property
    def path(self) -> Path:
        return self.status.path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def on_policy(self) -> Path:
        return self.path / "on_policy.jsonl"

    @property
    def export(self) -> Path:
        return self.path / "export"

    def update(self, **changes: Any) -> None:
        """Change fields of the status and replace run.json."""
        self.status = replace(self.status, **changes)
        if self._follows:
            return
        values = self.status.as_dict()
        values["export"] = None if self.status.export is None else self.status.export.name
        write_text(self.path / "run.json", json.dumps(values, indent=2) + "\n")

    def record(self, event: TrainStep | Evaluated) -> None:
        """Add a line to metrics.jsonl and bring run.json up to date."""
        if self._follows:
            return
        record = metric_record(event)
        with writing(self._metrics), self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        latest = {_metric_name(record): without_kind(record)}
        self.update(step=event.step, metrics=self.status.metrics | latest)

    def metrics(self) -> tuple[list[TrainStep], list[Evaluated]]:
        """All optimiser steps and evaluations so far.

        Raises:
            UsageError: another version of Tessera wrote them.
        """
        return read_metrics(self._metrics)

    def rewind(self, step: int) -> None:
        """Forget the metrics of steps after `step`, which a resumed run makes again."""
        if self._follows:
            return
        kept = [record for record in read_records(self._metrics) if record["step"] <= step]
        metrics = {_metric_name(record): without_kind(record) for record in kept}
        write_text(self._metrics, "".join(json.dumps(record) + "\n" for record in kept))
        self.update(step=step, metrics=metrics)

    @property
    def _metrics(self) -> Path:
        return self.path / METRICS_FILE


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a refusal of the file system to write `path`, for instance for lack of space, into a RunError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"cannot write {path}: {reason}", hint="make room on the disk, then use --resume"
        ) from error


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` as a whole.

    Raises:
        RunError: the file system refuses.
    """
    # Always the same name: a run has one writer, and what a killed one left is overwritten by the next.
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            temporary.write_bytes(content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of `text` in UTF-8."""
    write_bytes(path, text.encode())


def _clear(path: Path) -> None:
    """Make `path` an empty directory; what says that it holds a run goes last."""
    path.mkdir(parents=True, exist_ok=True)
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == "run.json"):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _metric_name(record: dict[str, Any]) -> str:
    """The key of `RunStatus.metrics` that a line of metrics.jsonl brings up to date."""
    return "train" if record["kind"] == "train" else "latest" if record["step"] else "start"


def _this_process() -> tuple[int, float]:
    process = psutil.Process()
    return process.pid, process.create_time()
