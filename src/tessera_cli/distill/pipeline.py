"""The stages of a run: prepare, train, evaluate, export, report."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tessera_cli.distill.evaluation.run_report import write_report
from tessera_cli.distill.events import Evaluated, Event, Listener, Note, StageStarted, TrainStep, event_values
from tessera_cli.distill.generation.teacher_answers import read_answered_inputs
from tessera_cli.distill.inputs import RunInputs
from tessera_cli.distill.runs.claims import check_available, check_resumable
from tessera_cli.distill.runs.run_directory import RunDirectory, writing
from tessera_cli.distill.runs.run_models import check_caches, prepare_models
from tessera_cli.distill.training.checkpoint import (
    TrainerState,
    checkpoint_path,
    latest_checkpoint,
    load_checkpoint,
)
from tessera_cli.distill.training.loop import train
from tessera_cli.distill.training.lora import add_adapters, check_peft, merge_adapters, save_adapters
from tessera_cli.distill.training.processes import Processes
from tessera_cli.distill.training.tracked import flat_config, tracked_values
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
        paths = {name: str(getattr(self, name)) for name in ("run_dir", "export", "report")}
        return asdict(self) | paths | {"start": event_values(self.start), "end": event_values(self.end)}


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
    train_section = recipe.recipe.train
    if train_section.lora is not None:
        check_peft()
    device = select_device(device)
    processes = Processes(device, trackers=train_section.trackers, run_dir=run_dir)
    processes.check(recipe.recipe)
    # The others may have named it a second later.
    run_dir = processes.agree(run_dir)
    if not processes.is_main:
        listener = _told_by_the_main_process
    if processes.is_main and resume:
        check_resumable(run_dir, recipe.recipe)
    elif processes.is_main:
        check_available(run_dir, overwrite=overwrite)
    listener(StageStarted("prepare"))
    with processes.main_first():
        inputs = read_answered_inputs(
            recipe.recipe, home=home, offline=offline, device=device, listener=listener
        )
        for note in inputs.notes:
            listener(Note(note))
        fingerprints = inputs.fingerprints()
        check_caches(inputs, fingerprints, device=device, home=home)
        if not processes.is_main:
            run = RunDirectory.follow(run_dir, recipe.recipe)
        elif resume:
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
        return _run_stages(run, inputs, processes, listener, device, home)


def _told_by_the_main_process(event: Event) -> None:
    """The listener of every other process."""


def _run_stages(
    run: RunDirectory, inputs: RunInputs, processes: Processes, listener: Listener, device: str, home: Path
) -> RunResult:
    recipe = inputs.recipe
    with processes.main_first():
        run.refresh()
        models = prepare_models(run, inputs, device=device, home=home, listener=listener)
    student = models.student
    if recipe.train.lora is not None:
        add_adapters(student, recipe.train.lora, seed=recipe.seed)

    def record(event: Event) -> None:
        if isinstance(event, TrainStep | Evaluated):
            run.record(event)
            processes.log(tracked_values(event), event.step)
        listener(event)

    trainer = Trainer(
        student,
        models.teacher,
        loss=recipe.loss,
        train=recipe.train,
        num_steps=inputs.steps.num_steps,
        processes=processes,
        listener=record,
        seed=recipe.seed,
    )
    with processes.main_first():
        _restore(run, trainer, listener)
    with processes.tracking(run.path.name, flat_config(recipe), from_step=trainer.step + 1):
        end = train(run, inputs, trainer, student, models.evaluator, processes, record)
        num_steps, num_tokens = trainer.step, trainer.tokens

        if end.step != trainer.step:
            trainer.load_state_dict(_load(run, checkpoint_path(run.checkpoints, end.step)))
        listener(StageStarted("export"))
        with trainer.measured_weights():
            exported = processes.whole_decoder(student)
            if processes.is_main:
                _export_student(run, exported, inputs)
        if processes.is_main:
            listener(StageStarted("report"))
            write_report(run, inputs, models.load_teacher(), device, end=end)
            run.update(status="finished")
        processes.wait()
    return RunResult(
        run_dir=run.path,
        export=run.export,
        report=run.path / "report.md",
        num_steps=num_steps,
        num_tokens=num_tokens,
        start=run.metrics()[1][0],
        end=end,
    )


def _restore(run: RunDirectory, trainer: Trainer, listener: Listener) -> None:
    """Take the trainer to the latest checkpoint, if there is one, and the run's records back to it."""
    checkpoint = latest_checkpoint(run.checkpoints)
    if checkpoint is not None:
        trainer.load_state_dict(_load(run, checkpoint))
        listener(Note(f"resumed from {checkpoint}"))
    run.rewind(trainer.step)


def _load(run: RunDirectory, checkpoint: Path) -> TrainerState:
    return load_checkpoint(checkpoint, fingerprints=run.status.fingerprints)


def _export_student(run: RunDirectory, student: Decoder, inputs: RunInputs) -> None:
    """Write the student as a model directory with its tokenizer, and beside it what adapters it has."""
    recipe, stored = inputs.recipe, inputs.teacher.config.dtype
    name = stored if recipe.export.dtype == "auto" else recipe.export.dtype
    if recipe.train.lora is not None:
        with _whole_directory(run.path / "adapters") as unfinished:
            save_adapters(student, unfinished, recipe.train.lora, base=recipe.teacher.model)
        merge_adapters(student)
    with _whole_directory(run.export) as unfinished:
        save_decoder(student, unfinished, dtype=select_dtype(name, stored, "cpu"))
        inputs.teacher.tokenizer.save(unfinished)
    run.update(export=run.export)


@contextmanager
def _whole_directory(path: Path) -> Iterator[Path]:
    """A directory to write in, which becomes `path` at the end, whole or not at all."""
    unfinished = path.with_name(f".{path.name}")
    try:
        with writing(path):
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            yield unfinished
            if path.exists():
                shutil.rmtree(path)
            unfinished.rename(path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


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
