"""The training stage: every step of the plan, with the evaluations and checkpoints that fall due."""

from collections.abc import Iterator
from pathlib import Path

from tessera_cli.distill.data.corpus import TrainBatch, build_batch
from tessera_cli.distill.evaluation.evaluate import Evaluator
from tessera_cli.distill.events import CheckpointSaved, Listener, Note, StageStarted
from tessera_cli.distill.inputs import RunInputs
from tessera_cli.distill.runs.run_directory import RunDirectory
from tessera_cli.distill.training.checkpoint import latest_checkpoint, save_checkpoint
from tessera_cli.distill.training.interrupt import DeferredInterrupt
from tessera_cli.distill.training.trainer import Trainer
from tessera_cli.models.decoder import Decoder


def train(
    run: RunDirectory,
    inputs: RunInputs,
    trainer: Trainer,
    student: Decoder,
    evaluator: Evaluator,
    listener: Listener,
) -> None:
    """Take the trainer from where it is to the last step, measured before, on the way and after.

    On Ctrl-C the last complete step is saved before KeyboardInterrupt goes on.
    """
    due = _Due(run, trainer, student, evaluator, listener)
    ctrl_c = DeferredInterrupt(
        lambda: listener(Note("stopping after this step; Ctrl-C again stops at once and loses it"))
    )
    with ctrl_c.installed():
        try:
            if trainer.step == 0:
                due.evaluation("evaluate")
            listener(StageStarted("train"))
            for micro_batches in _batches(inputs, trainer.step):
                with ctrl_c.step():
                    trainer.train_step(micro_batches)
                if trainer.step % inputs.recipe.eval.every == 0:
                    due.evaluation()
                if trainer.step % inputs.recipe.checkpoint.every == 0:
                    due.checkpoint()
            due.checkpoint()
            due.evaluation("evaluate")
        except KeyboardInterrupt:
            if trainer.step > 0 and not ctrl_c.forced:
                due.checkpoint()
            raise


def _batches(inputs: RunInputs, start: int) -> Iterator[list[TrainBatch]]:
    documents = inputs.train.documents
    for step in inputs.steps.steps(start):
        yield [build_batch(documents[i] for row in micro_batch for i in row) for micro_batch in step]


class _Due:
    """What falls due at the trainer's step, done once for each step."""

    def __init__(
        self, run: RunDirectory, trainer: Trainer, student: Decoder, evaluator: Evaluator, listener: Listener
    ) -> None:
        self._run, self._trainer, self._student = run, trainer, student
        self._evaluator, self._listener = evaluator, listener
        self._evaluated = {evaluation.step for evaluation in run.metrics()[1]}
        self._saved: Path | None = latest_checkpoint(run.checkpoints)

    def evaluation(self, stage: str | None = None) -> None:
        step = self._trainer.step
        if step in self._evaluated:
            return
        if stage is not None:
            self._listener(StageStarted(stage))
        self._listener(self._evaluator.evaluate(self._student, step=step))
        self._evaluated.add(step)

    def checkpoint(self) -> None:
        step = self._trainer.step
        directory = self._run.checkpoints
        if self._saved == directory / f"step-{step:06d}":
            return
        self._saved = save_checkpoint(
            directory,
            self._trainer.state_dict(),
            fingerprints=self._run.status.fingerprints,
            keep=self._run.recipe.checkpoint.keep,
        )
        self._listener(CheckpointSaved(step, self._saved))
