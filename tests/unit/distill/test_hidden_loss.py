"""The oracle is a loop over documents, layers and tokens in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera_cli.distill.data.corpus import TrainBatch, build_batch
from tessera_cli.distill.losses.hidden import HiddenStateLoss, hidden_loss, layer_outputs
from tessera_cli.distill.students.layer_choice import hidden_pairs
from tessera_cli.distill.students.student import build_student, forward_batch
from tessera_cli.distill.training.checkpoint import load_checkpoint, save_checkpoint
from tessera_cli.distill.training.trainer import Trainer
from tessera_cli.errors import UsageError
from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.hidden_section import HiddenLossSection
from tests.training_factories import (
    assert_same_bits,
    copy_weights,
    make_decoder,
    make_documents,
    make_steps,
    make_trainer,
)

KINDS = ["mse", "cosine"]


def _narrow(seed: int) -> Decoder:
    """A student of half the teacher's width."""
    from dataclasses import replace

    from tessera_cli.distill.students.student_start import random_decoder

    student = random_decoder(replace(make_decoder(seed).config, hidden_size=8), seed=seed)
    with torch.no_grad():
        for parameter in student.parameters():
            if parameter.ndim == 2:
                parameter.mul_(20)
    return student


def _oracle(kind: str, student: Tensor, teacher: Tensor, projection: Tensor | None) -> Tensor:
    """[m, hidden] of one pair, float64 -> sum over tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for s, t in zip(student, teacher, strict=True):
        s = s if projection is None else projection @ s
        if kind == "mse":
            total = total + ((s - t) ** 2).sum() / len(t)
        else:
            total = total + 1 - (s @ t) / ((s @ s).sqrt() * (t @ t).sqrt())
    return total


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [6, 4])
def test_loss_and_gradients_equal_the_definition(kind: str, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [(0, 1), (1, 3)]
    measure = HiddenStateLoss(HiddenLossSection(kind=kind), pairs, student_hidden=width, teacher_hidden=6)
    student = [torch.randn(5, width, generator=generator).requires_grad_() for _ in pairs]
    teacher = [torch.randn(5, 6, generator=generator) for _ in pairs]
    exact = [tensor.detach().double().requires_grad_() for tensor in student]
    weights = [p.detach().double().requires_grad_() for p in measure.projections]
    assert len(weights) == (0 if width == 6 else 2)
    expected = torch.zeros((), dtype=torch.float64)
    for pair, (s, t) in enumerate(zip(exact, teacher, strict=True)):
        expected = expected + _oracle(kind, s, t.double(), weights[pair] if weights else None) / 2
    loss = measure(student, teacher)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-7)
    ours = torch.autograd.grad(loss, [*student, *measure.projections])
    theirs = torch.autograd.grad(expected, [*exact, *weights])
    for gradient, correct in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient.double(), correct, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_of_all_layers_has_nothing_to_learn(kind: str) -> None:
    teacher = make_decoder(1, num_hidden_layers=3)
    (step,) = make_steps(1)
    trainer = make_trainer(build_student(teacher, [0, 1, 2]), teacher, loss={"hidden": {"kind": kind}})
    figures = trainer.train_step(step)
    assert figures is not None
    assert figures.hidden_loss == pytest.approx(0, abs=1e-6)
    assert figures.loss == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_measures_supervised_tokens_whatever_the_split(kind: str) -> None:
    loss = {"hidden": {"kind": kind, "weight": 0.5, "pairs": [[0, 0], [1, 2]]}}
    teacher = make_decoder(1, num_hidden_layers=3)
    documents = make_documents([9, 4, 6, 3])
    total, count = torch.zeros((), dtype=torch.float64), 0
    student = _narrow(2)
    projections = hidden_loss(HiddenLossSection(**loss["hidden"]), student, teacher).projections
    for document in documents:
        batch = build_batch([document])
        with torch.no_grad():
            with layer_outputs(student, [0, 1], batch.target_index) as ours:
                forward_batch(student, batch)
            with layer_outputs(teacher, [0, 2], batch.target_index) as theirs:
                forward_batch(teacher, batch)
        for s, t, w in zip(ours, theirs, projections, strict=True):
            total += _oracle(kind, s.double(), t.double(), w.double()).detach() / 2
        count += len(batch.target_ids)

    def gradients(batches: list[TrainBatch]) -> dict[str, Tensor]:
        trainer = make_trainer(_narrow(2), make_decoder(1, num_hidden_layers=3), loss=loss)
        figures = trainer.train_step(batches)
        assert figures is not None
        assert figures.hidden_loss == pytest.approx((total / count).item(), rel=1e-4)
        assert figures.loss == pytest.approx(figures.kd_loss + 0.5 * figures.hidden_loss, rel=1e-5)
        return {name: p.grad for name, p in trainer.parameters.items()}

    whole = gradients([build_batch(documents)])
    assert {name for name in whole if name.startswith("hidden.")} == {
        "hidden.projections.0",
        "hidden.projections.1",
    }
    for name, gradient in gradients([build_batch(documents[:1]), build_batch(documents[1:])]).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-6, msg=name)


def _plain(seed: int, **keys: Any) -> Trainer:
    return make_trainer(make_decoder(seed), make_decoder(1, num_hidden_layers=3), num_steps=6, **keys)


def test_without_it_every_bit_is_as_if_it_were_not_there() -> None:
    (step,) = make_steps(1)
    plain, off = _plain(2), _plain(2, loss={"hidden": {"kind": "none"}})
    assert plain.train_step(step).hidden_loss is None
    off.train_step(step)
    assert_same_bits(plain.state_dict().student, off.state_dict().student)


@pytest.mark.parametrize("stop", [1, 3])
def test_the_projection_is_trained_and_resumed_to_the_bit(stop: int, tmp_path: Path) -> None:
    def trainer(seed: int) -> Trainer:
        teacher = make_decoder(1, num_hidden_layers=3)
        keys = {"learning_rate": 0.01, "loss": {"hidden": {"kind": "mse"}}}
        return make_trainer(_narrow(seed), teacher, num_steps=6, **keys)

    steps = make_steps(6)
    whole, first, resumed = trainer(2), trainer(2), trainer(3)
    before = whole.state_dict().student["hidden.projections.0"].clone()
    for step in steps:
        whole.train_step(step)
    assert not torch.equal(whole.state_dict().student["hidden.projections.0"], before)
    for step in steps[:stop]:
        first.train_step(step)
    path = save_checkpoint(tmp_path, first.state_dict(), fingerprints={}, keep=1)
    with torch.no_grad():
        for parameter in resumed.parameters.values():
            parameter.fill_(0.5)  # nothing but the checkpoint may count
    resumed.load_state_dict(load_checkpoint(path, fingerprints={}))
    for step in steps[stop:]:
        resumed.train_step(step)
    assert_same_bits(resumed.state_dict().student, whole.state_dict().student)
    assert_same_bits(resumed.state_dict().optimizer, whole.state_dict().optimizer)


@pytest.mark.parametrize("kind", KINDS)
def test_training_brings_hidden_states_together(kind: str) -> None:
    (step,) = make_steps(1)
    teacher = make_decoder(1, num_hidden_layers=3)
    trainer = make_trainer(
        _narrow(2), teacher, num_steps=20, learning_rate=0.02, loss={"hidden": {"kind": kind}}
    )
    figures = [trainer.train_step(step) for _ in range(20)]
    assert figures[-1].hidden_loss < 0.9 * figures[0].hidden_loss


def test_a_checkpoint_of_a_run_without_projection_is_refused() -> None:
    teacher = make_decoder(1, num_hidden_layers=3)
    plain = make_trainer(_narrow(2), teacher)
    with pytest.raises(UsageError, match="another shape"):
        make_trainer(_narrow(2), teacher, loss={"hidden": {"kind": "mse"}}).load_state_dict(
            plain.state_dict()
        )


def test_a_narrow_arithmetic_still_measures_in_float32_and_leaves_no_hook() -> None:
    (step,) = make_steps(1)
    teacher, student = make_decoder(1, num_hidden_layers=3), _narrow(2)
    exact = make_trainer(_narrow(2), teacher, loss={"hidden": {"kind": "cosine"}}).train_step(step)
    trainer = make_trainer(student, teacher, loss={"hidden": {"kind": "cosine"}}, dtype="bfloat16")
    low = trainer.train_step(step)
    assert low.hidden_loss == pytest.approx(exact.hidden_loss, rel=0.05)
    assert low.hidden_loss != exact.hidden_loss
    assert not any(layer._forward_hooks for model in (student, teacher) for layer in model.layers)
    before = copy_weights(teacher)
    trainer.train_step(step)
    assert_same_bits(copy_weights(teacher), before)


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [
        (3, 3, [(0, 0), (1, 1), (2, 2)]),
        (2, 6, [(0, 2), (1, 5)]),
        (4, 6, [(0, 1), (1, 2), (2, 4), (3, 5)]),
        (4, 2, [(0, 0), (1, 0), (2, 1), (3, 1)]),
    ],
)
def test_even_pairs_end_with_the_last_layers(
    student: int, teacher: int, expected: list[tuple[int, int]]
) -> None:
    assert hidden_pairs("even", student, teacher) == expected


@pytest.mark.parametrize(
    ("pairs", "message"),
    [([[2, 0]], "layer 2 of the student, which has 2"), ([[0, 3]], "layer 3 of the teacher, which has 3")],
)
def test_layers_that_are_not_there_are_refused(pairs: list[list[int]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hidden_pairs(pairs, 2, 3)


def test_a_cache_of_the_teacher_has_no_layers() -> None:
    with pytest.raises(UsageError, match="no hidden states of layers"):
        hidden_loss(HiddenLossSection(kind="mse"), make_decoder(2), None)
