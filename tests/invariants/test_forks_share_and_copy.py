"""Samples of one prompt share its blocks until they write, and end, abort and preempt each on their own."""

from dataclasses import replace
from pathlib import Path

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.sequence import FinishReason, SampleError, Sequence
from tessera_cli.errors import CapacityError
from tests.engines import greedy, make_engine, random_prompts, run_samples, tiny_decoder
from tests.factories import FakeModel, expected_tokens, make_scheduler, make_sequences, run_all, run_step


def add(scheduler: Scheduler, length: int, *, n: int, max_tokens: int = 6, prefix: str = "r") -> Sequence:
    (sequence,) = make_sequences([length], n=n, max_tokens=max_tokens, prefix=prefix)
    scheduler.add(sequence)
    return sequence


def check_outputs(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        expected = expected_tokens(sequence, max_model_len=scheduler.config.max_model_len)
        assert sequence.token_ids == expected, sequence


@pytest.mark.parametrize("offset", [0, 1, 15])
@pytest.mark.parametrize("num_blocks", [200, 9])
def test_a_fork_at_any_offset_of_the_last_block(offset: int, num_blocks: int) -> None:
    scheduler = make_scheduler(
        num_blocks=num_blocks, block_size=16, max_model_len=128, max_num_batched_tokens=64
    )
    model = FakeModel(16)
    add(scheduler, 32 + offset, n=4, max_tokens=40)
    run_step(scheduler, model)
    tables = [sequence.block_table for sequence in scheduler.queues.running]
    assert tables == [tables[0]] * 4
    output, _ = run_step(scheduler, model)
    # The last holder writes in place.
    assert len(output.block_copies) == (3 if offset else 0)
    assert [sequence.block_table[:2] for sequence in scheduler.queues.running] == [tables[0][:2]] * 4
    finished = run_all(scheduler, model)
    assert len({tuple(sequence.token_ids) for sequence in finished}) == 4
    check_outputs(scheduler, finished)
    assert (scheduler.num_preemptions > 0) == (num_blocks == 9)
    assert scheduler.num_forks == 3


def test_the_samples_of_a_step_come_from_one_row_and_run_in_their_order_before_newcomers() -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    add(scheduler, 6, n=3)
    add(scheduler, 3, n=1, prefix="late")
    output, _ = run_step(scheduler, model)
    assert [item.num_samples for item in output.scheduled] == [3, 1]
    assert [s.key for s in scheduler.queues.running] == [("r0", 0), ("r0", 1), ("r0", 2), ("late0", 0)]
    output, _ = run_step(scheduler, model)
    assert [item.num_samples for item in output.scheduled] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ({"max_num_seqs": 3}, "max_num_seqs is 3"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens is 3"),
    ],
)
def test_more_samples_than_can_run_at_once_are_refused(sizes: dict[str, int], limit: str) -> None:
    scheduler = make_scheduler(**sizes)
    with pytest.raises(CapacityError, match=f"n=4.*{limit}"):
        add(scheduler, 3, n=4)
    add(scheduler, 3, n=3)


def test_the_places_of_children_are_kept_free_before_they_exist() -> None:
    scheduler, model = make_scheduler(max_num_seqs=4, max_num_batched_tokens=4), FakeModel(4)
    add(scheduler, 9, n=3)  # three steps of prefill
    for index in range(3):
        add(scheduler, 1, n=1, prefix=f"late{index}-")
    while scheduler.has_unfinished():
        run_step(scheduler, model)  # checks that no more than four run
        if scheduler.num_forks == 0:
            assert scheduler.num_running <= 2


def test_the_others_go_on_where_one_sample_stops() -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    params = SamplingParams(max_tokens=12, n=4, stop_token_ids=tuple(range(0, 23, 5)), ignore_eos=True)
    sequence = Sequence("r", [3] * 6, params)
    scheduler.add(sequence)
    finished = run_all(scheduler, model)
    assert len(finished) == 4
    assert len({one.num_tokens for one in finished}) > 1
    check_outputs(scheduler, finished)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_sample_can_be_ended_from_outside(index: int) -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    add(scheduler, 6, n=3)
    with pytest.raises(RuntimeError, match="before it has forked"):
        scheduler.finish("r0", 0, FinishReason.STOP)
    run_step(scheduler, model)
    ended = scheduler.finish("r0", index, FinishReason.STOP)
    assert ended is not None
    assert (ended.key, ended.finish_reason) == (("r0", index), FinishReason.STOP)
    assert scheduler.finish("r0", index, FinishReason.STOP) is None
    scheduler.check_invariants()
    finished = run_all(scheduler, model)
    assert {one.child_index for one in finished} == {0, 1, 2} - {index}
    check_outputs(scheduler, finished)


def test_no_sequence_is_ended_from_outside_during_a_step() -> None:
    scheduler = make_scheduler()
    add(scheduler, 6, n=1)
    scheduler.schedule()
    with pytest.raises(RuntimeError, match="outstanding"):
        scheduler.finish("r0", 0, FinishReason.STOP)


@pytest.mark.parametrize("num_steps", range(4))
@pytest.mark.parametrize("during", [False, True])
def test_an_abort_ends_all_samples(num_steps: int, during: bool) -> None:
    scheduler, model = make_scheduler(max_num_batched_tokens=4), FakeModel(4)
    add(scheduler, 6, n=3)
    for _ in range(num_steps):
        run_step(scheduler, model)
    if during:
        output = scheduler.schedule()
        assert scheduler.abort("r0")
        ended = scheduler.commit(output, model.run(output))
        assert {one.finish_reason for one in ended} == {FinishReason.ABORT}
    else:
        assert scheduler.abort("r0")
    assert not scheduler.abort("r0")
    scheduler.check_invariants()
    assert not scheduler.has_unfinished()
    assert scheduler.block_pool.num_free_blocks == 8


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_sample_that_fails_at_the_fork_leaves_the_others(failing: int) -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    add(scheduler, 6, n=3)
    output = scheduler.schedule()
    tokens = model.run(output)
    tokens["r0", 0][failing] = SampleError("not finite")
    (failed,) = scheduler.commit(output, tokens)
    assert (failed.key, failed.finish_reason) == (("r0", failing), FinishReason.ERROR)
    scheduler.check_invariants()
    check_outputs(scheduler, run_all(scheduler, model))


def test_a_step_that_forks_or_copies_and_fails_is_undone() -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    add(scheduler, 6, n=3)
    finished = []
    while scheduler.has_unfinished():
        model.fail(scheduler.schedule())
        scheduler.rollback()
        scheduler.check_invariants()
        finished += run_step(scheduler, model)[1]
    assert len(finished) == 3
    check_outputs(scheduler, finished)


def test_a_preempted_sample_restarts_from_the_blocks_that_it_shares() -> None:
    scheduler, model = make_scheduler(max_num_batched_tokens=32), FakeModel(4)
    add(scheduler, 16, n=3, max_tokens=12)  # four blocks shared, and up to three of its own for each
    run_step(scheduler, model)
    victims: set[int] = set()
    while scheduler.has_unfinished():
        output, finished = run_step(scheduler, model)
        victims |= {sequence.child_index for sequence in output.preempted}
        check_outputs(scheduler, finished)
        for item in output.scheduled:
            assert item.start >= 16
    assert victims == {1, 2}


@pytest.mark.parametrize("num_blocks", [200, 26])
def test_the_engine_gives_each_sample_what_it_gives_it_alone(tiny_model_dir: Path, num_blocks: int) -> None:
    """Sample i of n is sample i of any other n, and at temperature 0 all are the greedy one."""
    decoder = tiny_decoder(tiny_model_dir)
    sizes = {"num_blocks": num_blocks, "max_model_len": 100}
    prompts = random_prompts([15, 16, 17, 30])
    sampled = SamplingParams(max_tokens=24, seed=5, ignore_eos=True)

    def run(n: int, params: SamplingParams, **sizes: int) -> dict[str, list[list[int]]]:
        engine = make_engine(decoder, **sizes)
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), prompt, replace(params, n=n, seed=index))
        outputs = run_samples(engine)
        assert engine.stats().num_forks == (n - 1) * len(prompts)
        assert (engine.stats().num_preemptions > 0) == (sizes["num_blocks"] == 26)
        return {key: [one.token_ids for one in many] for key, many in outputs.items()}

    many = run(3, sampled, **sizes)
    assert all(len({tuple(tokens) for tokens in samples}) == 3 for samples in many.values())
    two = run(2, sampled, num_blocks=200)
    assert {key: samples[:2] for key, samples in many.items()} == two
    alone = run(1, greedy(24), num_blocks=200)
    assert run(3, greedy(24), **sizes) == {key: samples * 3 for key, samples in alone.items()}
