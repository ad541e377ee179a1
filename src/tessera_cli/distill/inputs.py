"""All that a recipe names, found, read and checked: where planning and running both start; no torch."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from tessera_cli.distill.data.corpus import Corpus, check_not_empty, load_corpus
from tessera_cli.distill.data.document import Document
from tessera_cli.distill.data.packing import StepPlan, numbers_of
from tessera_cli.distill.data.sources import check_source
from tessera_cli.distill.data.stream import DocumentStream
from tessera_cli.distill.data.teacher_written import PromptSet, Writer
from tessera_cli.distill.students.layer_choice import hidden_pairs
from tessera_cli.distill.students.student_config import StudentShape, fingerprint_model, student_shape
from tessera_cli.errors import ModelError, UsageError
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.source import Notify, resolve_model
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.data_section import DataSource
from tessera_cli.recipe.loader import dump_recipe
from tessera_cli.recipe.schema import Recipe

# Of documents that are told by number.
MOST_NAMED = 5


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher's directory and what is known of it without its weights."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer

    def fingerprint(self) -> str:
        """SHA-256 over the configuration and the weight files."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint_model(self.path)


StepDocuments = list[list[Document]]
"""The documents of an optimiser step, by micro-batch."""


@dataclass(frozen=True, eq=False)
class RunInputs:
    """A recipe with its teacher, its student's shape, its documents and every step."""

    recipe: Recipe
    teacher: Teacher
    student: StudentShape
    train: Corpus | DocumentStream
    eval: Corpus
    steps: StepPlan

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the models and the documents."""
        data_notes = (*self.train.notes("data.train"), *self.eval.notes("data.eval"), *self._overlap_notes)
        return (*self._model_notes, *data_notes)

    @cached_property
    def trained_on(self) -> tuple[int, ...]:
        """The held-out documents that are trained on as well, by number."""
        contents = _contents(self.eval)
        known = self.train.having(frozenset(contents))
        return tuple(number for number, content in enumerate(contents) if content in known)

    @property
    def _overlap_notes(self) -> tuple[str, ...]:
        if not self.trained_on:
            return ()
        named = ", ".join(map(str, self.trained_on[:MOST_NAMED]))
        more = ", …" if len(self.trained_on) > MOST_NAMED else ""
        return (
            f"data.eval: {len(self.trained_on)} of {len(self.eval.documents)} documents are in data.train as "
            f"well (documents {named}{more}): figures on them say nothing of new text",
        )

    @property
    def _model_notes(self) -> tuple[str, ...]:
        theirs, ours = self.teacher.config.vocab_size, self.student.num_stored_rows
        if ours is None:
            return ()
        return (
            f"the teacher has {theirs:,} vocabulary rows and the student {ours:,}: both are cut to the "
            f"tokenizer's {self.student.config.vocab_size:,} ids",
        )

    @property
    def unanswered(self) -> tuple[PromptSet, ...]:
        """The prompts that the teacher has to answer before anything is trained."""
        splits = [split for split in (self.train, self.eval) if isinstance(split, Corpus)]
        return tuple(prompts for split in splits for prompts in split.unanswered)

    def step_documents(self, start: int = 0) -> Iterator[StepDocuments]:
        """The documents of every step after the first `start`, read as they are asked for.

        Raises:
            DataError: a stream is not what it was when the run was laid out.
        """
        groups = (numbers_of(step) for step in self.steps.steps())
        documents = self.train.in_order(groups, start)
        for step, found in zip(self.steps.steps(start), documents, strict=True):
            rest = iter(found)
            yield [list(islice(rest, sum(map(len, micro_batch)))) for micro_batch in step]

    def first_pass(self) -> Iterator[list[Document]]:
        """The run's micro-batches, up to the step after which each document was in one."""
        came: set[int] = set()
        for step in self.step_documents():
            for micro_batch in step:
                yield micro_batch
                came.update(map(id, micro_batch))
            if len(came) == len(self.train.lengths):
                return

    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that decides the weights: a resumed run must find the same."""
        return self.student.fingerprints() | {
            "recipe": hashlib.sha256(dump_recipe(self.recipe).encode()).hexdigest(),
            "teacher": self.teacher.fingerprint(),
            "tokenizer": self.teacher.tokenizer.fingerprint(),
            "data.train": self.train.fingerprint(),
            "data.eval": self.eval.fingerprint(),
        }


def read_inputs(
    recipe: Recipe, *, home: Path, offline: bool, notify: Notify | None = None, estimate: bool = False
) -> RunInputs:
    """Resolve the teacher, read and tokenise the documents, and lay out every step.

    `notify` hears of a conversion, which takes a while. `estimate` is as in `StepPlan.of`: good enough to
    tell, not to run.

    Raises:
        ModelError: no such teacher, or a tokenizer with more ids than the model.
        DataError: documents that cannot be read, or none to learn from.
        UsageError: a student or rows that do not fit this teacher.
    """
    # Before the teacher, which may have to be downloaded or converted first.
    for source in (*recipe.data.train, *recipe.data.eval):
        check_source(source)
    teacher = find_teacher(recipe, home=home, offline=offline, notify=notify)
    student = find_student(recipe, teacher, home=home, offline=offline, notify=notify)
    held_out = read_split(recipe, recipe.data.eval, teacher, home=home)
    if recipe.data.streaming:
        return _streamed(recipe, teacher, student, held_out, estimate)
    train = read_split(recipe, recipe.data.train, teacher, home=home, answer_tokens=answer_tokens(recipe))
    steps = StepPlan.of(train, data=recipe.data, train=recipe.train, seed=recipe.seed, estimate=estimate)
    return RunInputs(recipe, teacher, student, train, held_out, steps)


def find_teacher(recipe: Recipe, *, home: Path, offline: bool, notify: Notify | None = None) -> Teacher:
    """The recipe's teacher, with errors as `read_inputs`."""
    path = resolve_model(recipe.teacher.model, home=home, offline=offline, notify=notify)
    teacher = Teacher(path, ModelConfig.unquantised(path), Tokenizer.from_dir(path))
    num_ids, num_rows = teacher.tokenizer.num_ids, teacher.config.vocab_size
    if num_ids > num_rows:
        raise ModelError(f"the tokenizer of {path} has {num_ids} ids, its model only {num_rows}")
    _check_positions(recipe, teacher.config, "teacher")
    return teacher


def find_student(
    recipe: Recipe, teacher: Teacher, *, home: Path, offline: bool, notify: Notify | None = None
) -> StudentShape:
    """The shape of the recipe's student, with errors as `read_inputs`."""
    student = student_shape(
        recipe.student, teacher.config, teacher.tokenizer, home=home, offline=offline, notify=notify
    )
    _check_positions(recipe, student.config, "student")
    if recipe.loss.hidden.pairs is not None:
        depths = student.config.num_hidden_layers, teacher.config.num_hidden_layers
        hidden_pairs(recipe.loss.hidden.pairs, *depths)
    return student


def read_split(
    recipe: Recipe,
    sources: Sequence[DataSource],
    teacher: Teacher,
    *,
    home: Path,
    answer_tokens: int | None = None,
) -> Corpus:
    """The documents of `sources`, as the recipe wants them; see `load_corpus`."""
    is_written = any(source.written_by is not None for source in sources)
    return load_corpus(
        sources,
        teacher.tokenizer,
        max_seq_len=recipe.data.max_seq_len,
        train_on=recipe.data.train_on,
        answer_tokens=answer_tokens,
        # Hashing the teacher's weights takes a while.
        writer=Writer(teacher.fingerprint(), recipe.teacher.dtype, home) if is_written else None,
    )


def answer_tokens(recipe: Recipe) -> int | None:
    """The most tokens of an answer that the student gives while it trains; None if it gives none."""
    return None if recipe.data.on_policy is None else recipe.data.on_policy.max_tokens


def _streamed(
    recipe: Recipe, teacher: Teacher, student: StudentShape, held_out: Corpus, estimate: bool
) -> RunInputs:
    stream = DocumentStream(
        recipe.data.train,
        teacher.tokenizer,
        max_seq_len=recipe.data.max_seq_len,
        train_on=recipe.data.train_on,
        answer_tokens=answer_tokens(recipe),
        watched=frozenset(_contents(held_out)),
    )
    steps = StepPlan.of(
        stream,
        data=recipe.data,
        train=recipe.train,
        seed=recipe.seed,
        first_epoch=stream.read_ahead(),
        estimate=estimate,
    )
    check_not_empty(recipe.data.train, stream.intake)
    return RunInputs(recipe, teacher, student, stream, held_out, steps)


def _contents(corpus: Corpus) -> list[bytes]:
    return [document.content for document in corpus.documents]


def _check_positions(recipe: Recipe, config: ModelConfig, who: str) -> None:
    positions = config.max_position_embeddings
    if recipe.data.max_seq_len > positions:
        raise UsageError(
            f"data.max_seq_len is {recipe.data.max_seq_len}, but the {who} has {positions} positions",
            hint=f"lower `data.max_seq_len` to {positions}",
        )
