"""The figures of a finished run, taken again."""

from pathlib import Path

from tessera_cli.distill.evaluation.evaluate import Evaluator, held_out_batches
from tessera_cli.distill.evaluation.measured import Measured, speculative_speedup
from tessera_cli.distill.events import Listener, Note, StageStarted
from tessera_cli.distill.inputs import find_student, find_teacher, read_split
from tessera_cli.distill.runs.run_models import recorded_start
from tessera_cli.distill.runs.run_status import RunStatus, read_run
from tessera_cli.distill.students.student_start import start_student
from tessera_cli.engine.sizing import select_device
from tessera_cli.errors import UsageError
from tessera_cli.models.loader import load_decoder, select_dtype
from tessera_cli.models.vocabulary import load_first_rows
from tessera_cli.recipe.loader import load_recipe


def evaluate_run(
    run_dir: Path, *, limit: int | None, listener: Listener, device: str, home: Path, offline: bool
) -> Measured:
    """Measure the untrained and the exported student of a run on its held-out documents.

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
    source = find_teacher(recipe, home=home, offline=offline, notify=lambda text: listener(Note(text)))
    held_out = read_split(recipe, recipe.data.eval, source, home=home)
    shape = find_student(recipe, source, home=home, offline=offline)
    now = {**shape.fingerprints(), "teacher": source.fingerprint(), "data.eval": held_out.fingerprint()}
    _check_unchanged(status, now)
    dtype = select_dtype(recipe.teacher.dtype, source.config.dtype, device)
    teacher = load_first_rows(source.path, shape.config.vocab_size, dtype=dtype, device=device)
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
    del untrained
    student = load_decoder(status.export, dtype=select_dtype("float32", "float32", device), device=device)
    figures = evaluator.evaluate(student, step=status.step)
    served = student.to(dtype)
    speculative = speculative_speedup(teacher, served, figures, held_out.documents)
    return Measured(
        source.path, status.export, start, figures, speculative, tuple(held_out.notes("data.eval"))
    )


def _check_unchanged(status: RunStatus, now: dict[str, str]) -> None:
    changed = [name for name, value in now.items() if status.fingerprints[name] != value]
    if changed:
        raise UsageError(
            f"{status.path}: changed since the run: {', '.join(changed)}", hint="restore what changed"
        )
