"""The training stage: every step of the plan, with the evaluations and checkpoints that fall due."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tessera_cli.distill.data.corpus import Corpus, TrainBatch, build_batch
from tessera_cli.distill.data.document import Document
from tessera_cli.distill.evaluation.evaluate import Evaluator
from tessera_cli.distill.events import CheckpointSaved, Evaluated, Listener, Note, StageStarted
from tessera_cli.distill.generation.answer_log import AnswerLog
from tessera_cli.distill.generation.on_policy import OnPolicyDocuments
from tessera_cli.distill.inputs import RunInputs
from tessera_cli.distill.runs.run_directory import RunDirectory
from tessera_cli.distill.training.checkpoint import checkpoint_path, latest_checkpoint, save_checkpoint
from tessera_cli.distill.training.interrupt import DeferredInterrupt
from tessera_cli.distill.training.processes import Processes
from tessera_cli.distill.training.trainer import Trainer
from tessera_cli.errors import DivergedError
from tessera_cli.models.decoder import Decoder


def train(
    run: RunDirectory,
    inputs: RunInputs,
    trainer: Trainer,
    student: Decoder,
    evaluator: Evaluator,
    processes: Processes,
    listener: Listener,
) -> Evaluated:
    """Take the trainer from where it is to the last step, measured before, on the way and after.

    On Ctrl-C the last complete step is saved before KeyboardInterrupt goes on.

    Returns:
        The figures of the weights to export: of the last step, or of the best checkpoint.
    """
    recipe = inputs.recipe
    due = _Due(run, trainer, student, evaluator, processes, listener)
    ctrl_c = DeferredInterrupt(
        lambda: listener(Note("stopping after this step; Ctrl-C again stops at once and loses it")),
        agree=processes.any if processes.count > 1 else None,
    )
    with ctrl_c.installed():
        try:
            if trainer.step == 0:
                due.evaluation("evaluate")
            listener(StageStarted("train"))
            for documents, batches in _batches(run, inputs, student, trainer.step, processes, listener):
                if due.stop_early():
                    break
                with ctrl_c.step(), _told_what_diverged(inputs, documents, due):
                    trainer.train_step(batches)
                if trainer.step % recipe.eval.every == 0:
                    due.evaluation()
                if trainer.step % recipe.checkpoint.every == 0:
                    due.checkpoint()
            due.checkpoint()
            due.evaluation("evaluate")
        except KeyboardInterrupt:
            if trainer.step > 0 and not ctrl_c.forced:
                due.checkpoint()
            raise
    return due.best if recipe.export.weights == "best" else due.evaluations[-1]


def _batches(
    run: RunDirectory,
    inputs: RunInputs,
    student: Decoder,
    start: int,
    processes: Processes,
    listener: Listener,
) -> Iterator[tuple[list[list[Document]], list[TrainBatch]]]:
    section = inputs.recipe.data.on_policy
    if section is None:
        steps = inputs.step_documents(start)
    else:
        log = AnswerLog(run.on_policy)
        steps = OnPolicyDocuments(inputs, section, student, log, processes, listener).steps(start)
    for documents in steps:
        yield documents, [build_batch(micro_batch) for micro_batch in documents]


@contextmanager
def _told_what_diverged(
    inputs: RunInputs, documents: Sequence[Sequence[Document]], due: "_Due"
) -> Iterator[None]:
    """Name the documents of a step that diverged, and what is left of the run."""
    try:
        yield
    except DivergedError as error:
        corpus = inputs.train.documents if isinstance(inputs.train, Corpus) else ()
        numbers = {id(document): number for number, document in enumerate(corpus)}
        # Without targets they had no part in it, and are not counted.
        counted = [row for row in documents if any(document.supervised.any() for document in row)]
        blamed = [document for batch in error.micro_batches for document in counted[batch]]
        known = [str(numbers[id(document)]) for document in blamed if id(document) in numbers]
        what = f"documents {', '.join(known)} of data.train" if known else f"{len(blamed)} documents"
        saved = f"the last checkpoint is {due.saved}" if due.saved else "there is no checkpoint"
        raise DivergedError(f"{error.message}, on {what}; {saved}", error.micro_batches) from error


class _Due:
    """What falls due at the trainer's step, done once for each step.

    Attributes:
        evaluations: all figures of the run.
        saved: the newest checkpoint.
    """

    def __init__(
        self,
        run: RunDirectory,
        trainer: Trainer,
        student: Decoder,
        evaluator: Evaluator,
        processes: Processes,
        listener: Listener,
    ) -> None:
        self._run, self._trainer, self._student = run, trainer, student
        self._evaluator, self._processes, self._listener = evaluator, processes, listener
        self.evaluations = run.metrics()[1]
        self.saved: Path | None = latest_checkpoint(run.checkpoints)

    @property
    def best(self) -> Evaluated:
        """The first evaluation of trained weights with the lowest KL."""
        trained = [evaluation for evaluation in self.evaluations if evaluation.step]
        return min(trained or self.evaluations, key=lambda evaluation: evaluation.kl)

    def evaluation(self, stage: str | None = None) -> None:
        step = self._trainer.step
        if any(evaluation.step == step for evaluation in self.evaluations):
            return
        if stage is not None:
            self._listener(StageStarted(stage))
        with self._trainer.measured_weights():
            figures = self._evaluator.evaluate(self._student, step=step)
        # One figure for all: processes that rounded differently would part ways over it.
        self.evaluations.append(self._processes.agree(figures))
        self._listener(self.evaluations[-1])
        if step and self._run.recipe.export.weights == "best" and self.best.step == step:
            self.checkpoint()

    def stop_early(self) -> bool:
        """Whether the recipe's patience is at an end; tells it."""
        patience = self._run.recipe.train.early_stop_patience
        since = sum(evaluation.step > self.best.step for evaluation in self.evaluations)
        if patience is None or since < patience:
            return False
        self._listener(
            Note(f"stopped early: held-out KL is lowest at step {self.best.step}, {since} evaluations ago")
        )
        return True

    def checkpoint(self) -> None:
        step = self._trainer.step
        directory, recipe = self._run.checkpoints, self._run.recipe
        if self.saved == checkpoint_path(directory, step):
            return
        state = self._trainer.state_dict()
        self.saved = checkpoint_path(directory, step)
        if self._processes.is_main:
            save_checkpoint(
                directory,
                state,
                fingerprints=self._run.status.fingerprints,
                keep=recipe.checkpoint.keep,
                best_step=self.best.step if recipe.export.weights == "best" else None,
            )
        self._listener(CheckpointSaved(step, self.saved))
