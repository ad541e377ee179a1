"""Training and evaluation are two ways to the same figures."""

import pytest
import torch

from tessera_cli.distill.data.corpus import build_batch
from tessera_cli.distill.evaluation.evaluate import Evaluator
from tessera_cli.distill.losses.dense import chunked_distillation_loss
from tests.training_factories import make_decoder, make_documents, make_trainer
from tests.unit.distill.loss_oracle import KINDS, make_inputs, oracle, section


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("split", [[6], [2, 1, 3]])
def test_the_first_step_has_the_figures_that_the_evaluation_before_it_has(
    tied: bool, split: list[int]
) -> None:
    documents = make_documents([9, 4, 17, 6, 3, 12])
    student, teacher = make_decoder(2, tied=tied), make_decoder(1, num_hidden_layers=3, tied=tied)
    figures = Evaluator(teacher, [build_batch(documents)], chunk_tokens=5).evaluate(student, step=0)
    rest = iter(documents)
    batches = [build_batch([next(rest) for _ in range(size)]) for size in split]
    step = make_trainer(student, teacher, loss={"ce_weight": 0.5}).train_step(batches)
    assert step is not None
    assert step.kd_loss == pytest.approx(figures.kl, rel=1e-5)
    assert step.ce_loss == pytest.approx(figures.cross_entropy, rel=1e-5)
    assert figures.kl > 0.1


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_is_rounded_to_bfloat16_makes_no_divergence_negative(
    kind: str, temperature: float
) -> None:
    inputs = make_inputs(4)
    hidden = inputs["student_hidden"].detach()
    # The very same model but for the rounding of its hidden states: divergences at the edge of zero.
    near = inputs | {
        "student_hidden": hidden,
        "teacher_hidden": hidden.bfloat16(),
        "teacher_head": inputs["student_head"].detach(),
    }
    asked = section(kind, temperature=temperature)
    with torch.no_grad():
        found = chunked_distillation_loss(**near, loss=asked, chunk_tokens=4).loss.item()
        exact = oracle(asked, near, hidden.double(), near["student_head"].double()).item()
    assert exact > 0
    # What float32 rounds at 11 tokens; log-probabilities in bfloat16 would be off a hundred times more.
    assert found == pytest.approx(exact, abs=5e-6)
    assert found > -5e-6
