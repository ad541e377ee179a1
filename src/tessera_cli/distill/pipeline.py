"""The stages of a run: prepare, train, evaluate, export, report."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tessera_cli.distill.evaluation.run_report import write_report
from tessera_cli.distill.events import Evaluated, Event, Listener, Note, StageStarted, TrainStep
from tessera_cli.distill.inputs import RunInputs, read_inputs
from tessera_cli.distill.runs.run_directory import (
    RunDirectory,
    check_available,
    check_resumable,
    writing,
)
from tessera_cli.distill.runs.run_models import check_caches, prepare_models
from tessera_cli.distill.training.checkpoint import latest_checkpoint, load_checkpoint
from tessera_cli.distill.training.loop import train
from tessera_cli.distill.training.trainer import Trainer
from tessera_cli.engine.sizing import select_device
from tessera_cli.errors import RunError, UsageError
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import save_decoder, select_dtype
from tessera_cli.recipe.loader import LoadedRecipe


@dataclass(frozen=True)
class RunResult:
    """A finished run: where it is, and the student's figures before and after training."""

    run_dir: Path
    export: Path
    report: Path
    num_steps: int
    num_tokens: int
    start: Evaluated
    end: Evaluated

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the same names, for JSON."""
        return asdict(self) | {name: str(getattr(self, name)) for name in ("run_dir", "export", "report")}


def run_recipe(
    recipe: LoadedRecipe,
    *,
    run_dir: Path,
    listener: Listener,
    resume: bool,
    overwrite: bool,
    device: str,
    offline: bool,
    home: Path,
) -> RunResult:
    """Distil the student of `recipe` into `run_dir`.

    Ctrl-C leaves a run that `resume` continues to the very weights that it would have had.

    Raises:
        UsageError: whatever can be known before the first step, with nothing written.
        RunError: the run could not be finished.
        KeyboardInterrupt: the user stopped it.
    """
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other", hint="give one of them")
    if resume:
        check_resumable(run_dir, recipe.recipe)
    else:
        check_available(run_dir, overwrite=overwrite)
    device = select_device(device)
    listener(StageStarted("prepare"))
    inputs = read_inputs(recipe.recipe, home=home, offline=offline, notify=lambda text: listener(Note(text)))
    for note in inputs.notes:
        listener(Note(note))
    fingerprints = inputs.fingerprints()
    check_caches(inputs, fingerprints, device=device, home=home)
    if resume:
        run = RunDirectory.reopen(run_dir, recipe, fingerprints=fingerprints)
    else:
        run = RunDirectory.create(
            run_dir,
            recipe,
            num_steps=inputs.steps.num_steps,
            fingerprints=fingerprints,
            overwrite=overwrite,
        )
    with _outcome_recorded(run):
        return _run_stages(run, inputs, listener, device, home)


def _run_stages(
    run: RunDirectory, inputs: RunInputs, listener: Listener, device: str, home: Path
) -> RunResult:
    recipe = inputs.recipe
    models = prepare_models(run, inputs, device=device, home=home, listener=listener)
    student = models.student

    def record(event: Event) -> None:
        if isinstance(event, TrainStep | Evaluated):
            run.record(event)
        listener(event)

    trainer = Trainer(
        student,
        models.teacher,
        loss=recipe.loss,
        train=recipe.train,
        num_steps=inputs.steps.num_steps,
        device=device,
        listener=record,
    )
    _restore(run, trainer, listener)
    train(run, inputs, trainer, student, models.evaluator, record)

    listener(StageStarted("export"))
    _export(run, student, inputs)
    listener(StageStarted("report"))
    write_report(run, inputs, models.load_teacher(), device)
    start, *_, end = (*run.metrics()[1],)
    run.update(status="finished")
    return RunResult(
        run_dir=run.path,
        export=run.export,
        report=run.path / "report.md",
        num_steps=trainer.step,
        num_tokens=trainer.tokens,
        start=start,
        end=end,
    )


def _restore(run: RunDirectory, trainer: Trainer, listener: Listener) -> None:
    """Take the trainer to the latest checkpoint, if there is one, and the run's records back to it."""
    checkpoint = latest_checkpoint(run.checkpoints)
    if checkpoint is not None:
        trainer.load_state_dict(load_checkpoint(checkpoint, fingerprints=run.status.fingerprints))
        listener(Note(f"resumed from {checkpoint}"))
    run.rewind(trainer.step)


def _export(run: RunDirectory, student: Decoder, inputs: RunInputs) -> None:
    """Write the student as a model directory with its tokenizer, whole or not at all."""
    stored = inputs.teacher.config.dtype
    name = stored if inputs.recipe.export.dtype == "auto" else inputs.recipe.export.dtype
    unfinished = run.path / ".export"
    try:
        with writing(run.export):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            save_decoder(student, unfinished, dtype=select_dtype(name, stored, "cpu"))
            inputs.teacher.tokenizer.save(unfinished)
            if run.export.exists():
                shutil.rmtree(run.export)
            unfinished.rename(run.export)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    run.update(export=run.export)


@contextmanager
def _outcome_recorded(run: RunDirectory) -> Iterator[None]:
    """Write into run.json how a run that does not finish ended."""
    try:
        yield
    except KeyboardInterrupt:
        run.update(status="interrupted")
        raise
    except Exception as error:  # whatever it is, it is told and goes on to the caller
        # A full disk may be the very cause.
        with suppress(RunError):
            run.update(status="failed", error=f"{type(error).__name__}: {error}")
        raise
