"""The models of a run: its student, and as much of its teacher as training needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tessera_cli.distill.data.corpus import TrainBatch
from tessera_cli.distill.evaluation.evaluate import Evaluator, held_out_batches
from tessera_cli.distill.events import Listener
from tessera_cli.distill.inputs import RunInputs
from tessera_cli.distill.runs.run_directory import RunDirectory, write_text
from tessera_cli.distill.students.student_start import StudentStart, decide_start, start_student
from tessera_cli.distill.students.width_pruning import read_width, width_as_json
from tessera_cli.distill.teacher_cache.build import open_caches
from tessera_cli.distill.teacher_cache.keys import batch_documents
from tessera_cli.distill.teacher_cache.layout import CacheDirectory
from tessera_cli.distill.teacher_cache.plan import CachePlan, plan_caches
from tessera_cli.distill.teacher_cache.teacher_parts import head_of, load_layers
from tessera_cli.distill.training.teacher_side import CachedTeacher
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import select_dtype
from tessera_cli.models.vocabulary import keep_first_rows, load_first_rows
from tessera_cli.recipe.schema import Recipe

WIDTH_FILE = "width.json"


@dataclass(frozen=True, eq=False)
class RunModels:
    """A run's untrained `student`, its `teacher` as the trainer takes it, and the evaluator of both.

    `load_teacher` gives the whole teacher, which a cached run has not in memory.
    """

    student: Decoder
    teacher: Decoder | CachedTeacher
    evaluator: Evaluator
    load_teacher: Callable[[], Decoder]


def prepare_models(
    run: RunDirectory, inputs: RunInputs, *, device: str, home: Path, listener: Listener
) -> RunModels:
    """Load what the run needs; with a teacher cache, write first what it lacks.

    Raises:
        UsageError: the cache belongs to another run, or is damaged (a DataError).
        RunError: it cannot be written.
    """
    recipe = inputs.recipe
    dtype = select_dtype(recipe.teacher.dtype, inputs.teacher.config.dtype, device)
    num_rows = inputs.student.config.vocab_size
    load_teacher = partial(load_first_rows, inputs.teacher.path, num_rows, dtype=dtype, device=device)
    batches = _held_out(inputs)
    chunk_tokens = recipe.train.loss_chunk_tokens
    if recipe.teacher.cache.kind == "none":
        teacher = load_teacher()
        student = start_student(teacher, inputs.student, _start(run, teacher, inputs), seed=recipe.seed)
        return RunModels(
            student, teacher, Evaluator(teacher, batches, chunk_tokens=chunk_tokens), lambda: teacher
        )

    plans = _plan_caches(inputs, batches, run.status.fingerprints, device, home)
    train_cache, eval_cache = open_caches(plans, load_teacher, listener)
    if _needs_whole_teacher(run, inputs):
        teacher = load_teacher()
        start = _start(run, teacher, inputs)
    else:
        layers = run.status.layers or inputs.student.layers or (0,)
        part = load_layers(inputs.teacher.path, layers, dtype=dtype, device=device)
        teacher = keep_first_rows(part, num_rows)
        start = _start(run, teacher, inputs)
        start = StudentStart(tuple(range(len(start.layers))), None)
    student = start_student(teacher, inputs.student, start, seed=recipe.seed)
    head = head_of(teacher)
    evaluator = Evaluator(
        head, batches, chunk_tokens=chunk_tokens, teacher_hidden=eval_cache.hidden_states(batches)
    )
    return RunModels(student, CachedTeacher(train_cache.reader, head.head_weight), evaluator, load_teacher)


def check_caches(inputs: RunInputs, fingerprints: dict[str, str], *, device: str, home: Path) -> None:
    """See, before a run begins, that the caches that are there are its own.

    Raises:
        UsageError: they are not; or the recipe asks for more than the teacher has.
    """
    if inputs.recipe.teacher.cache.kind != "none":
        for plan in _plan_caches(inputs, _held_out(inputs), fingerprints, device, home):
            CacheDirectory(plan.path, plan.fingerprints)


def recorded_start(run_dir: Path, layers: tuple[int, ...], recipe: Recipe) -> StudentStart:
    """What was decided when the run in `run_dir` began."""
    width = read_width(run_dir / WIDTH_FILE) if recipe.student.init == "width" else None
    return StudentStart(layers, width)


def _held_out(inputs: RunInputs) -> list[TrainBatch]:
    recipe = inputs.recipe
    return held_out_batches(
        inputs.eval.documents,
        max_targets=recipe.eval.max_tokens,
        max_seq_len=recipe.data.max_seq_len,
        rows_per_batch=recipe.train.micro_batch_size,
    )


def _plan_caches(
    inputs: RunInputs, held_out: Sequence[TrainBatch], fingerprints: dict[str, str], device: str, home: Path
) -> tuple[CachePlan, CachePlan]:
    return plan_caches(
        inputs,
        [batch_documents(batch) for batch in held_out],
        run_fingerprints=fingerprints,
        teacher_dtype=select_dtype(inputs.recipe.teacher.dtype, inputs.teacher.config.dtype, device),
        home=home,
    )


def _start(run: RunDirectory, teacher: Decoder, inputs: RunInputs) -> StudentStart:
    """What importance decided when the run began: a resumed run must not decide anew."""
    if run.status.layers is not None:
        return recorded_start(run.path, run.status.layers, inputs.recipe)
    start = decide_start(teacher, inputs)
    if start.width is not None:
        write_text(run.path / WIDTH_FILE, width_as_json(start.width))
    run.update(layers=start.layers)
    return start


def _needs_whole_teacher(run: RunDirectory, inputs: RunInputs) -> bool:
    """Whether the student cannot be made of some of the teacher's layers alone."""
    return inputs.recipe.student.init == "width" or (run.status.layers or inputs.student.layers) is None
