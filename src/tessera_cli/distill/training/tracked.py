"""What trackers get of a run: its recipe under dotted keys, and the numbers of its events."""

from dataclasses import asdict
from typing import Any

from tessera_cli.distill.events import Evaluated, TrainStep
from tessera_cli.recipe.schema import Recipe


def flat_config(recipe: Recipe) -> dict[str, str | int | float | bool]:
    """The recipe with every default; what is no plain value is told as text."""
    flat: dict[str, str | int | float | bool] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict):
            for name, child in value.items():
                walk(child, f"{key}.{name}" if key else name)
        else:
            flat[key] = value if isinstance(value, str | int | float | bool) else str(value)

    walk(recipe.model_dump(), "")
    return flat


def tracked_values(event: TrainStep | Evaluated) -> dict[str, float]:
    """The figures of an event, as `train/loss` or `eval/kl`; what was not measured is left out."""
    kind = "train" if isinstance(event, TrainStep) else "eval"
    values = asdict(event)
    return {f"{kind}/{name}": value for name, value in values.items() if isinstance(value, int | float)}
