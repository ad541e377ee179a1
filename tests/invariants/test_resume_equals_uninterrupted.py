"""N steps, a checkpoint, and N steps more by fresh objects equal 2N steps, bit by bit."""

import os
from pathlib import Path

import pytest

from tessera_cli.distill.training.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from tessera_cli.distill.training.trainer import Trainer
from tests.training_factories import assert_same_bits, make_decoder, make_steps, make_trainer

NUM_STEPS = 8
FINGERPRINTS = {"recipe": "r"}


def _trainer(seed: int) -> Trainer:
    # The seed differs between runs: what a resumed run starts from must come from the checkpoint alone.
    return make_trainer(
        make_decoder(seed), make_decoder(1), num_steps=NUM_STEPS, learning_rate=0.01, warmup_ratio=0.3
    )


def _run(trainer: Trainer, start: int, stop: int) -> list[float]:
    figures = [trainer.train_step(step) for step in make_steps(NUM_STEPS)[start:stop]]
    return [
        value for figure in figures if figure for value in (figure.loss, figure.learning_rate, figure.tokens)
    ]


def _interrupt(descriptor: int) -> None:
    raise KeyboardInterrupt


def _assert_same(left: Trainer, right: Trainer) -> None:
    one, other = left.state_dict(), right.state_dict()
    assert (one.step, one.tokens, one.supervised_tokens) == (
        other.step,
        other.tokens,
        other.supervised_tokens,
    )
    assert_same_bits(one.student, other.student)
    assert_same_bits(one.optimizer, other.optimizer)


@pytest.mark.parametrize("stop", [0, 1, 5])
def test_resume_equals_uninterrupted(tmp_path: Path, stop: int) -> None:
    whole = _trainer(2)
    figures = _run(whole, 0, NUM_STEPS)

    first = _trainer(2)
    before = _run(first, 0, stop)
    path = save_checkpoint(tmp_path, first.state_dict(), fingerprints=FINGERPRINTS, keep=1)
    resumed = _trainer(3)
    resumed.load_state_dict(load_checkpoint(path, fingerprints=FINGERPRINTS))
    assert before + _run(resumed, stop, NUM_STEPS) == figures
    _assert_same(resumed, whole)


def test_a_run_that_dies_while_it_saves_resumes_from_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _trainer(2)
    _run(whole, 0, NUM_STEPS)

    dying = _trainer(2)
    _run(dying, 0, 3)
    save_checkpoint(tmp_path, dying.state_dict(), fingerprints=FINGERPRINTS, keep=2)
    _run(dying, 3, 6)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, dying.state_dict(), fingerprints=FINGERPRINTS, keep=2)

    path = latest_checkpoint(tmp_path)
    assert path is not None
    resumed = _trainer(3)
    resumed.load_state_dict(load_checkpoint(path, fingerprints=FINGERPRINTS))
    assert resumed.step == 3
    _run(resumed, 3, NUM_STEPS)
    _assert_same(resumed, whole)


def test_training_on_does_not_change_a_state_that_was_loaded(tmp_path: Path) -> None:
    trainer = _trainer(2)
    _run(trainer, 0, 2)
    state = load_checkpoint(
        save_checkpoint(tmp_path, trainer.state_dict(), fingerprints=FINGERPRINTS, keep=1),
        fingerprints=FINGERPRINTS,
    )
    resumed = _trainer(3)
    resumed.load_state_dict(state)
    kept = {name: tensor.clone() for name, tensor in state.optimizer.items()}
    _run(resumed, 2, 4)
    assert_same_bits(state.optimizer, kept)
    assert resumed.state_dict().student.keys() == state.student.keys()
