"""The speed-up that is promised of a draft model, against the process that it describes."""

import random
from dataclasses import replace

import pytest

from tessera_cli.distill.evaluation.speculative import best_speedup, expected_speedup, measure_cost_ratio
from tests.training_factories import make_decoder


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("draft_length", [0, 1, 5])
def test_the_formula_counts_the_tokens_of_a_round(acceptance: float, draft_length: int) -> None:
    generator = random.Random(0)
    rounds = 20_000
    tokens = 0
    for _ in range(rounds):
        accepted = 0
        while accepted < draft_length and generator.random() < acceptance:
            accepted += 1
        tokens += accepted + 1  # the teacher's own token ends every round
    cost = 0.25
    simulated = tokens / rounds / (draft_length * cost + 1)
    assert expected_speedup(acceptance, draft_length, cost) == pytest.approx(simulated, rel=0.02)


def test_the_best_draft_length_is_the_best_of_all_and_grows_as_drafts_get_cheaper() -> None:
    lengths = []
    for cost in (1.0, 0.5, 0.2, 0.05, 0.01):
        best = best_speedup(0.8, cost)
        assert best.speedup == max(expected_speedup(0.8, length, cost) for length in range(17))
        assert best.speedup == expected_speedup(0.8, best.draft_length, cost)
        lengths.append(best.draft_length)
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_a_draft_that_costs_more_than_it_saves_is_not_used() -> None:
    # The first draft token pays exactly where the acceptance is above the cost (corollary 3.9).
    assert (best_speedup(0.5, 0.51).draft_length, best_speedup(0.5, 0.51).speedup) == (0, 1.0)
    assert best_speedup(0.5, 0.49).draft_length == 1
    assert best_speedup(0.0, 0.01).draft_length == 0


def test_the_cost_is_measured_wherever_one_token_still_fits() -> None:
    teacher, student = make_decoder(0, num_hidden_layers=3), make_decoder(1, num_hidden_layers=1)
    for length in (1, 10, 64, 500):
        ratio = measure_cost_ratio(teacher, student, [1] * length)
        assert ratio is not None
        assert ratio > 0


@pytest.mark.parametrize(("positions", "is_measured"), [(2, False), (3, True), (4, True), (5, True)])
def test_a_student_of_few_positions_is_measured_as_soon_as_it_can_decode(
    positions: int, is_measured: bool
) -> None:
    teacher, student = make_decoder(0), make_decoder(1, num_hidden_layers=1)
    student.config = replace(student.config, max_position_embeddings=positions)
    ratio = measure_cost_ratio(teacher, student, [1] * 10)
    assert (ratio is not None) == is_measured
