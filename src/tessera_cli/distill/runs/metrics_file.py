"""metrics.jsonl: one line for every optimiser step and evaluation of a run."""

import json
import math
from pathlib import Path
from typing import Any

from tessera_cli.distill.events import Evaluated, TrainStep, event_values
from tessera_cli.errors import UsageError

METRICS_FILE = "metrics.jsonl"


def metric_record(event: TrainStep | Evaluated) -> dict[str, Any]:
    """The line of an event: its figures, and of which kind it is."""
    return {"kind": "train" if isinstance(event, TrainStep) else "eval", **event_values(event)}


def without_kind(record: dict[str, Any]) -> dict[str, Any]:
    """The figures of a line."""
    return {key: value for key, value in record.items() if key != "kind"}


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of `path`, none where it does not exist.

    Raises:
        UsageError: it holds something else.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    try:
        # A line without its end was cut off when the process died.
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except ValueError as error:
        raise _foreign(path) from error


def read_metrics(path: Path) -> tuple[list[TrainStep], list[Evaluated]]:
    """All optimiser steps and evaluations in `path`.

    Raises:
        UsageError: it holds something else, or lines with other figures than today's.
    """
    steps, evaluations = [], []
    for record in read_records(path):
        try:
            values = without_kind(record)
            if record["kind"] == "train":
                steps.append(TrainStep(**values))
            else:
                infinite = {name: math.inf for name, value in values.items() if value is None}
                evaluations.append(Evaluated(**values | infinite))
        except (AttributeError, KeyError, TypeError) as error:
            raise _foreign(path) from error
    return steps, evaluations


def _foreign(path: Path) -> UsageError:
    return UsageError(
        f"{path} is not what this version of Tessera writes",
        hint="go on with the version that began the run, or start anew with --overwrite",
    )
