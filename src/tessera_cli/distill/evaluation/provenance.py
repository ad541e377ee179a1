"""Where a result comes from: everything that one would need to make it again."""

import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

import psutil
import torch

from tessera_cli import __version__
from tessera_cli.distill.runs.run_directory import RunDirectory
from tessera_cli.recipe.loader import dump_recipe

_PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "numpy")


@dataclass(frozen=True)
class Provenance:
    """Of one run: when, on what, with which code, from which recipe and which inputs.

    `training_seconds` are those of optimiser steps alone, `wall_seconds` all from the start of the run to
    now, with whatever pause a stopped run made. `fingerprints` are SHA-256 of what the run read.
    """

    started: str
    wall_seconds: float
    training_seconds: float
    seed: int
    machine: str
    versions: dict[str, str]
    fingerprints: dict[str, str]
    recipe: str

    @classmethod
    def of(cls, run: RunDirectory, device: str) -> "Provenance":
        """That of `run`, whose steps are done, on this machine."""
        started = datetime.fromisoformat(run.status.created)
        return cls(
            started=f"{started:%Y-%m-%d %H:%M:%S} UTC",
            wall_seconds=(datetime.now(UTC) - started).total_seconds(),
            training_seconds=sum(step.step_seconds for step in run.metrics()[0]),
            seed=run.recipe.seed,
            machine=_machine(device),
            versions={"tessera": __version__, "python": platform.python_version()}
            | {name: version(name) for name in _PACKAGES},
            fingerprints=dict(run.status.fingerprints),
            recipe=dump_recipe(run.recipe),
        )


def _machine(device: str) -> str:
    memory = psutil.virtual_memory().total / 2**30
    host = f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} CPUs, {memory:.0f} GiB"
    if device == "cpu":
        return f"{host}, {torch.get_num_threads()} threads"
    return f"{host}, {torch.cuda.get_device_name(device)}"
