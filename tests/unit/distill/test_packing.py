"""The course of a run: exact counts, deterministic order, any starting step."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest

from tessera_cli.distill.data.packing import StepPlan, epoch_order, pack_rows
from tessera_cli.recipe.data_section import DataSection
from tessera_cli.recipe.train_section import TrainSection

SOURCE = {"path": "a.jsonl", "format": "text"}


class Documents(NamedTuple):
    lengths: list[int]
    supervised: list[int]
    row_tokens: list[int]


def make_plan(num_documents=37, seed=3, packing=True, max_seq_len=64, estimate=False, **train) -> StepPlan:
    random = np.random.default_rng(0)
    lengths = random.integers(2, 50, num_documents).tolist()
    supervised = [int(random.integers(1, length)) for length in lengths]
    data = DataSection(train=[SOURCE], eval=[SOURCE], max_seq_len=max_seq_len, packing=packing)
    train = {"micro_batch_size": 2, "gradient_accumulation_steps": 3, **train}
    documents = Documents(lengths, supervised, lengths)
    return StepPlan.of(documents, data=data, train=TrainSection(**train), seed=seed, estimate=estimate)


def documents(step) -> list[int]:
    return [document for micro_batch in step for row in micro_batch for document in row]


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_sees_every_document_once_in_rows_that_fit(packing):
    plan = make_plan(num_epochs=2, packing=packing)
    seen = [document for step in plan.steps() for document in documents(step)]
    half = len(plan.lengths)
    assert sorted(seen[:half]) == sorted(seen[half:]) == list(range(half))
    assert seen[:half] != seen[half:]
    for row in (row for step in plan.steps() for micro_batch in step for row in micro_batch):
        assert sum(plan.lengths[document] for document in row) <= 64
        assert packing or len(row) == 1
    assert plan.num_epochs == 2


def test_a_row_is_closed_only_when_the_next_document_does_not_fit():
    lengths = [30, 34, 1, 64, 10, 54]
    assert list(pack_rows(range(6), lengths, max_seq_len=64, packing=True)) == [(0, 1), (2,), (3,), (4, 5)]


@pytest.mark.parametrize("length", [{"max_tokens": 900}, {"max_steps": 7}, {"num_epochs": 3}])
def test_the_counts_are_those_of_the_steps(length):
    plan = make_plan(**length)
    steps = list(plan.steps())
    assert len(steps) == plan.num_steps
    assert sum(plan.lengths[d] for step in steps for d in documents(step)) == plan.num_tokens
    assert sum(plan.supervised[d] for step in steps for d in documents(step)) == plan.num_supervised_tokens
    shapes = [[len(micro_batch) for micro_batch in step] for step in steps]
    assert all(shape == [2, 2, 2] for shape in shapes[:-1])


@pytest.mark.parametrize("length", [{"max_steps": 400}, {"max_tokens": 90_000}, {"num_epochs": 90}])
def test_the_figures_of_a_run_too_long_to_count_are_near_those_that_it_has(monkeypatch, length):
    exact = make_plan(**length)
    assert not exact.is_estimate
    monkeypatch.setattr("tessera_cli.distill.data.packing.MOST_COUNTED", 500)
    estimate = make_plan(estimate=True, **length)
    assert estimate.is_estimate
    for name in ("num_steps", "num_tokens", "num_supervised_tokens", "num_epochs"):
        assert getattr(estimate, name) == pytest.approx(getattr(exact, name), rel=0.03), name
    # What a run needs to know is never estimated.
    assert make_plan(**length).num_steps == exact.num_steps


def test_a_run_without_end_is_laid_out_at_once():
    plan = make_plan(max_steps=10**12)
    assert plan.num_steps == 10**12
    assert plan.is_estimate
    assert len(next(plan.steps())) == 3


def test_max_tokens_stops_at_the_first_step_that_reaches_it():
    plan = make_plan(max_tokens=900)
    last = list(plan.steps())[-1]
    assert plan.num_tokens >= 900 > plan.num_tokens - sum(plan.lengths[d] for d in documents(last))


@pytest.mark.parametrize("length", [{"max_steps": 11}, {"num_epochs": 2}])
def test_starting_at_any_step_continues_the_same_course(length):
    plan = make_plan(**length)
    whole = list(plan.steps())
    for start in range(plan.num_steps + 1):
        assert list(plan.steps(start)) == whole[start:]


def test_the_last_partial_step_is_kept():
    plan = make_plan(num_documents=7, num_epochs=1, packing=False)
    assert [len(documents(step)) for step in plan.steps()] == [6, 1]


def test_the_order_depends_on_seed_and_epoch_only():
    orders = [tuple(epoch_order(20, seed=s, epoch=e)) for s, e in itertools.product((0, 1), (0, 1))]
    assert len(set(orders)) == 4
    assert epoch_order(20, seed=1, epoch=0) == list(orders[2])
