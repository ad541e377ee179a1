"""The stages of a run: prepare, train, evaluate, export, report."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tessera_cli.distill.evaluation.evaluate import Evaluator, held_out_batches
from tessera_cli.distill.evaluation.report import Report, draw_curve, render_report
from tessera_cli.distill.evaluation.samples import compare
from tessera_cli.distill.events import Evaluated, Event, Listener, Note, StageStarted, TrainStep
from tessera_cli.distill.inputs import RunInputs, find_student, find_teacher, read_inputs, read_split
from tessera_cli.distill.runs.run_directory import (
    RunDirectory,
    check_available,
    check_resumable,
    write_bytes,
    write_text,
    writing,
)
from tessera_cli.distill.runs.run_models import check_caches, prepare_models, recorded_start
from tessera_cli.distill.runs.run_status import read_run
from tessera_cli.distill.students.student_start import start_student
from tessera_cli.distill.training.checkpoint import latest_checkpoint, load_checkpoint
from tessera_cli.distill.training.loop import train
from tessera_cli.distill.training.trainer import Trainer
from tessera_cli.engine.sizing import select_device
from tessera_cli.errors import RunError, UsageError
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder, save_decoder, select_dtype
from tessera_cli.recipe.loader import LoadedRecipe, load_recipe


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


def evaluate_run(
    run_dir: Path, *, limit: int | None, listener: Listener, device: str, home: Path, offline: bool
) -> dict[str, dict[str, Any]]:
    """Measure the untrained ("start") and the exported student ("student") on held-out documents.

    `limit` is the number of supervised tokens to look at, the recipe's `eval.max_tokens` if None.

    Raises:
        UsageError: the run has no student yet, or its teacher or held-out documents changed.
    """
    status = read_run(run_dir)
    if status.export is None or status.layers is None:
        raise UsageError(f"{run_dir} has no exported student", hint="finish the run with --resume")
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}", hint="evaluate at least 1 token")
    recipe = load_recipe(run_dir / "recipe.yaml").recipe
    device = select_device(device)
    listener(StageStarted("evaluate"))
    source = find_teacher(recipe, home=home, offline=offline)
    held_out = read_split(recipe, recipe.data.eval, source.tokenizer)
    shape = find_student(recipe, source, home=home, offline=offline)
    now = {**shape.fingerprints(), "teacher": source.fingerprint(), "data.eval": held_out.fingerprint()}
    changed = [name for name, value in now.items() if status.fingerprints[name] != value]
    if changed:
        raise UsageError(
            f"{run_dir}: changed since the run: {', '.join(changed)}", hint="restore what changed"
        )
    dtype = select_dtype(recipe.teacher.dtype, source.config.dtype, device)
    teacher = load_decoder(source.path, dtype=dtype, device=device)
    batches = held_out_batches(
        held_out.documents,
        max_targets=limit or recipe.eval.max_tokens,
        max_seq_len=recipe.data.max_seq_len,
        rows_per_batch=recipe.train.micro_batch_size,
    )
    evaluator = Evaluator(teacher, batches, chunk_tokens=recipe.train.loss_chunk_tokens)
    untrained = start_student(
        teacher, shape, recorded_start(run_dir, status.layers, recipe), seed=recipe.seed
    )
    start = evaluator.evaluate(untrained, step=0)
    student = load_decoder(status.export, dtype=select_dtype("float32", "float32", device), device=device)
    return {"start": asdict(start), "student": asdict(evaluator.evaluate(student, step=status.step))}


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
    _report(run, inputs, models.load_teacher(), device)
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


def _report(run: RunDirectory, inputs: RunInputs, teacher: Decoder, device: str) -> None:
    # From disk and in the teacher's dtype: what the user will serve, at the same terms as the teacher.
    student = load_decoder(run.export, dtype=teacher.head_weight.dtype, device=device)
    comparison = compare(
        teacher,
        student,
        inputs.teacher.tokenizer,
        inputs.eval.documents,
        num_samples=inputs.recipe.eval.samples,
    )
    steps, evaluations = run.metrics()
    report = Report(
        recipe=inputs.recipe,
        teacher=inputs.teacher.config,
        student=student.config,
        layers=run.status.layers or (),
        train_steps=steps,
        evaluations=evaluations,
        comparison=comparison,
        notes=inputs.notes,
    )
    write_bytes(run.path / "curve.png", draw_curve(steps, evaluations))
    write_text(run.path / "report.md", render_report(report))


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
