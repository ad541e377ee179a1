"""Whether a directory may become a run's, or go on being it: known before anything is written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera_cli.distill.runs.metrics_file import METRICS_FILE, read_metrics
from tessera_cli.distill.runs.run_status import read_run
from tessera_cli.errors import UsageError
from tessera_cli.files import foreign_names
from tessera_cli.recipe.loader import load_recipe
from tessera_cli.recipe.schema import Recipe

# All that a run leaves in its directory; TensorBoard's files are under the project's name.
_ENTRIES = (
    *("run.json", "recipe.yaml", "origins.json", "width.json", METRICS_FILE, "on_policy.jsonl"),
    *("checkpoints", "export", "adapters", "report.md", "report.html", "curve.png", "tessera"),
)


def check_available(path: Path, *, overwrite: bool) -> None:
    """See that a new run may claim `path`.

    Raises:
        UsageError: it is a file, is not empty, or, to be overwritten, does not hold a run, holds a running
        one, or more than a run.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is not a directory")
    if not path.exists() or not any(path.iterdir()):
        return
    if not overwrite:
        raise UsageError(
            f"{path} is not empty", hint="continue with --resume, or replace it with --overwrite"
        )
    # Only what is known to be a run is ever deleted.
    if read_run(path).status == "running":
        raise UsageError(f"{path} is being run by another process", hint="choose another --output-dir")
    if foreign := foreign_names(path, _ENTRIES):
        raise UsageError(
            f"{path} holds more than a run: {', '.join(foreign)}",
            hint="move these away, or choose another --output-dir",
        )


def check_resumable(path: Path, recipe: Recipe) -> None:
    """See that `path` holds an unfinished run of exactly this recipe.

    Raises:
        UsageError: it does not.
    """
    if not all((path / name).is_file() for name in ("run.json", "recipe.yaml")):
        raise UsageError(f"nothing to resume in {path}", hint="start the run without --resume")
    status = read_run(path)
    if not status.is_unfinished:
        how = "finished" if status.status == "finished" else "being run by another process"
        raise UsageError(f"nothing to resume: {path} is {how}", hint="choose another --output-dir")
    before = load_recipe(path / "recipe.yaml").recipe
    changed = differences(_flatten(before.model_dump()), _flatten(recipe.model_dump()))
    if changed:
        raise UsageError(
            f"{path} cannot be resumed: the recipe changed in {', '.join(changed)}",
            hint=f"its own recipe is {path / 'recipe.yaml'}; a changed one needs a new --output-dir",
        )
    read_metrics(path / METRICS_FILE)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The keys that have other values, or are in one of the two alone."""
    keys = before.keys() | after.keys()
    return sorted(key for key in keys if before.get(key) != after.get(key))


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, child in value.items():
        flat |= _flatten(child, f"{prefix}.{key}" if prefix else key)
    return flat
