import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from tessera_cli.distill.data.corpus import TrainBatch, build_batch
from tessera_cli.distill.events import Event, Note, TrainStep
from tessera_cli.distill.training.optimizer import learning_rate
from tessera_cli.errors import ModelError, RunError, UsageError
from tessera_cli.kernels.packed import PackedAttention
from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.train_section import TrainSection
from tests.training_factories import (
    assert_same_bits,
    copy_weights,
    make_decoder,
    make_documents,
    make_steps,
    make_trainer,
)


def _without_targets(batch: TrainBatch) -> TrainBatch:
    empty = torch.empty(0, dtype=torch.int64)
    return TrainBatch(batch.input_ids, batch.positions, batch.cu_seqlens, empty, empty)


def _logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    attend = PackedAttention([0, len(token_ids)], decoder.attention_layers).attend
    return decoder.logits(decoder(token_ids, torch.arange(len(token_ids)), attend))


def _plain_step(student: Decoder, teacher: Decoder, batches: list[TrainBatch], train: TrainSection) -> float:
    """A first optimiser step in a few lines, one document at a time; the gradient's norm before clipping."""
    matrices = [p for p in student.parameters() if p.ndim == 2]
    vectors = [p for p in student.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, betas=(0.9, 0.95), eps=1e-8)
    total = torch.zeros(())
    for batch in batches:
        for start, end in zip(batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
            inside = (batch.target_index >= start) & (batch.target_index < end)
            rows = batch.target_index[inside] - start
            logits = _logits(student, batch.input_ids[start:end])[rows]
            with torch.no_grad():
                teacher_logits = _logits(teacher, batch.input_ids[start:end])[rows]
            p, q = (teacher_logits / 2).log_softmax(-1), (logits / 2).log_softmax(-1)
            total = total + 4 * kl_div(q, p, log_target=True, reduction="sum")
            total = total + 0.5 * cross_entropy(logits, batch.target_ids[inside], reduction="sum")
    (total / sum(len(batch.target_ids) for batch in batches)).backward()
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), train.max_grad_norm)
    optimizer.step()
    return norm.item()


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_equals_the_plain_loop(tied: bool) -> None:
    teacher = make_decoder(1, num_hidden_layers=3, tied=tied)
    student, expected = make_decoder(2, tied=tied), make_decoder(2, tied=tied)
    keys = {"learning_rate": 0.01, "weight_decay": 5.0, "max_grad_norm": 0.5, "loss_chunk_tokens": 4}
    trainer = make_trainer(
        student, teacher, loss={"temperature": 2.0, "ce_weight": 0.5}, lr_scheduler="constant", **keys
    )
    (step,) = make_steps(1)
    figures = trainer.train_step(step)
    norm = _plain_step(expected, teacher, step, TrainSection(max_steps=1, **keys))
    assert figures is not None
    assert figures.grad_norm == pytest.approx(norm, rel=1e-4)
    assert norm > keys["max_grad_norm"]
    for name, weight in copy_weights(student).items():
        torch.testing.assert_close(
            weight, expected.get_parameter(name).detach(), rtol=1e-4, atol=1e-5, msg=name
        )


def test_training_brings_the_student_towards_the_teacher_and_leaves_the_teacher_alone() -> None:
    teacher, student = make_decoder(1), make_decoder(2)
    before = copy_weights(teacher)
    trainer = make_trainer(student, teacher, num_steps=30, learning_rate=0.02, loss={"ce_weight": 0.0})
    (step,) = make_steps(1)
    figures = [trainer.train_step(step) for _ in range(30)]
    assert figures[-1].kd_loss < 0.5 * figures[0].kd_loss
    assert_same_bits(copy_weights(teacher), before)
    assert not any(parameter.requires_grad for parameter in teacher.parameters())


def test_the_listener_is_told_what_happened() -> None:
    events: list[Event] = []
    loss = {"temperature": 2.0, "kd_weight": 0.7, "ce_weight": 0.4}
    trainer = make_trainer(make_decoder(2), make_decoder(1), num_steps=3, listener=events.append, loss=loss)
    steps = make_steps(3)
    returned = [trainer.train_step(step) for step in steps]
    assert events == returned
    for number, event in enumerate(events, start=1):
        assert isinstance(event, TrainStep)
        assert (event.step, event.num_steps) == (number, 3)
        assert event.tokens == sum(len(batch.input_ids) for done in steps[:number] for batch in done)
        assert event.supervised_tokens == sum(
            len(batch.target_ids) for done in steps[:number] for batch in done
        )
        assert event.ce_loss is not None
        assert event.loss == pytest.approx(0.7 * 4 * event.kd_loss + 0.4 * event.ce_loss, rel=1e-5)
        assert 0 < event.teacher_seconds < event.step_seconds
        assert event.tokens_per_second > 0
        assert event.peak_memory_bytes > 2**20
    assert trainer.step == 3
    with pytest.raises(ValueError, match="3 steps and all are done"):
        trainer.train_step(steps[0])


def test_a_cross_entropy_that_is_not_asked_for_is_not_told() -> None:
    (step,) = make_steps(1)
    figures = make_trainer(make_decoder(2), make_decoder(1)).train_step(step)
    assert figures is not None
    assert figures.ce_loss is None


def test_a_step_without_targets_is_skipped_and_told() -> None:
    events: list[Event] = []
    student = make_decoder(2)
    trainer = make_trainer(student, make_decoder(1), num_steps=2, listener=events.append)
    (step,) = make_steps(1)
    before = copy_weights(student)
    assert trainer.train_step([_without_targets(batch) for batch in step]) is None
    assert_same_bits(copy_weights(student), before)
    assert (trainer.step, trainer.tokens, trainer.state_dict().optimizer) == (1, 0, {})
    assert events == [Note("step 1 has no supervised token and was skipped")]
    figures = trainer.train_step([_without_targets(step[0]), step[1]])
    assert figures is not None
    assert (figures.step, figures.tokens) == (2, len(step[1].input_ids))


def test_a_token_that_is_neither_a_target_nor_before_one_never_matters() -> None:
    documents = make_documents([8, 6])
    for document in documents:
        document.supervised[-2:] = False, False
        document.supervised[3] = True
    gradients = []
    for _ in range(2):
        student = make_decoder(2)
        make_trainer(student, make_decoder(1), loss={"ce_weight": 1.0}).train_step([build_batch(documents)])
        gradients.append({name: p.grad for name, p in student.named_parameters()})
        for document in documents:
            document.token_ids[-1] = (document.token_ids[-1] + 7) % 61
    assert_same_bits(*gradients)


@pytest.mark.parametrize("poison", ["teacher", "student"])
def test_a_diverged_step_touches_no_weight(poison: str) -> None:
    teacher, student = make_decoder(1), make_decoder(2)
    trainer = make_trainer(student, teacher)
    first, second = make_steps(2)
    trainer.train_step(first)
    broken = {"teacher": teacher, "student": student}[poison]
    with torch.no_grad():
        broken.embed_tokens.weight[second[0].input_ids[0]] = float("inf")
    before, state = copy_weights(student), trainer.state_dict()
    moments = {name: tensor.clone() for name, tensor in state.optimizer.items()}
    with pytest.raises(RunError, match="diverged at step 2"):
        trainer.train_step(second)
    assert_same_bits(copy_weights(student), before)
    assert_same_bits(trainer.state_dict().optimizer, moments)
    assert trainer.step == 1


def test_a_gradient_that_is_not_finite_touches_no_weight() -> None:
    student = make_decoder(2)
    trainer = make_trainer(student, make_decoder(1))
    student.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    before = copy_weights(student)
    with pytest.raises(RunError, match=r"diverged at step 1: loss \d.*, gradient norm (nan|inf)"):
        trainer.train_step(make_steps(1)[0])
    assert_same_bits(copy_weights(student), before)


def test_accelerate_is_not_steered_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    (step,) = make_steps(1)
    plain, steered = make_decoder(2), make_decoder(2)
    make_trainer(plain, make_decoder(1)).train_step(step)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    make_trainer(steered, make_decoder(1)).train_step(step)
    assert_same_bits(copy_weights(steered), copy_weights(plain))


def test_bfloat16_changes_the_arithmetic_but_not_the_master_weights() -> None:
    (step,) = make_steps(1)
    figures = {}
    for dtype in ("float32", "bfloat16"):
        student = make_decoder(2)
        figures[dtype] = make_trainer(student, make_decoder(1), dtype=dtype).train_step(step)
        assert all(
            p.dtype == p.grad.dtype == torch.float32 for p in student.parameters() if p.grad is not None
        )
    assert figures["bfloat16"].loss != figures["float32"].loss
    assert figures["bfloat16"].loss == pytest.approx(figures["float32"].loss, rel=0.02)


def test_a_teacher_runs_in_its_own_dtype() -> None:
    (step,) = make_steps(1)
    teacher = make_decoder(1, dtype=torch.bfloat16)
    exact = make_trainer(make_decoder(2), make_decoder(1)).train_step(step)
    low = make_trainer(make_decoder(2), teacher).train_step(step)
    assert teacher.head_weight.dtype == torch.bfloat16
    assert low.loss != exact.loss
    assert low.loss == pytest.approx(exact.loss, rel=0.05)


def test_models_that_can_not_be_paired_are_refused() -> None:
    short = make_decoder(1)
    short.embed_tokens = torch.nn.Embedding(60, 16)
    with pytest.raises(ModelError, match="61 vocabulary rows and the teacher 60"):
        make_trainer(make_decoder(2), short)
    with pytest.raises(ValueError, match="must be float32"):
        make_trainer(make_decoder(2, dtype=torch.bfloat16), make_decoder(1))


def test_a_state_of_another_run_is_refused() -> None:
    (step,) = make_steps(1)
    trainer = make_trainer(make_decoder(2), make_decoder(1), num_steps=3)
    trainer.train_step(step)
    deeper = make_trainer(make_decoder(2, num_hidden_layers=3), make_decoder(1))
    with pytest.raises(UsageError, match="student of another shape"):
        deeper.load_state_dict(trainer.state_dict())
    trainer.train_step(step)
    with pytest.raises(UsageError, match="at step 2 of a run of 1"):
        make_trainer(make_decoder(2), make_decoder(1), num_steps=1).load_state_dict(trainer.state_dict())


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"lr_scheduler": "constant", "warmup_ratio": 0.0}, [1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"lr_scheduler": "linear", "warmup_ratio": 0.0}, [1.0, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_scheduler": "linear", "warmup_ratio": 0.4}, [0.5, 1.0, 1.0, 2 / 3, 1 / 3]),
        ({"lr_scheduler": "cosine", "warmup_ratio": 0.2}, [1.0, 1.0, (1 + math.sqrt(0.5)) / 2, 0.5, None]),
        ({"lr_scheduler": "constant", "warmup_ratio": 0.99}, [0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_learning_rate(keys: dict[str, Any], expected: list[float | None]) -> None:
    train = TrainSection(max_steps=5, learning_rate=2.0, **keys)
    for step, factor in enumerate(expected, start=1):
        rate = learning_rate(step, 5, train)
        assert rate > 0
        assert factor is None or rate == pytest.approx(2.0 * factor)
