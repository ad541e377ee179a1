"""What the scheduler publishes, keeps and takes back."""

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.sequence import SampleError, Sequence
from tests.factories import FakeModel, make_scheduler, run_all, run_step

PROMPT = [3] * 14


def add(scheduler: Scheduler, request_id: str) -> Sequence:
    sequence = Sequence(request_id, PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))
    scheduler.add(sequence)
    return sequence


def num_found(scheduler: Scheduler) -> int:
    return len(scheduler.prefix_cache.find(Sequence("probe", PROMPT, SamplingParams())))


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("during", [False, True])
def test_nothing_computed_before_a_reset_is_found_after_it(num_steps: int, during: bool) -> None:
    """Nor what is computed after it upon that, by a sequence that had no full block yet."""
    scheduler, model = make_scheduler(max_num_batched_tokens=3), FakeModel(4)
    add(scheduler, "old")
    for _ in range(num_steps):
        run_step(scheduler, model)
    if during:
        output = scheduler.schedule()
        scheduler.reset_prefix_cache()
        scheduler.commit(output, model.run(output))
    else:
        scheduler.reset_prefix_cache()
    run_all(scheduler, model)
    # Only who begins after the reset is known to have nothing of before it.
    assert num_found(scheduler) == (3 if num_steps == 0 and not during else 0)
    add(scheduler, "new")
    run_all(scheduler, model)
    assert num_found(scheduler) == 3


def test_of_a_cached_prefix_the_end_is_evicted_before_what_leads_to_it() -> None:
    scheduler, model = make_scheduler(), FakeModel(4)
    add(scheduler, "old")
    run_all(scheduler, model)
    pool = scheduler.block_pool
    assert pool.num_cached_blocks == 4  # the last of them has tokens of the output
    for num_left in (3, 2, 1, 0):
        pool.free(pool.allocate(pool.num_free_blocks - pool.num_cached_blocks + 1))
        assert num_found(scheduler) == num_left


def test_a_twin_that_fails_takes_nothing_from_the_one_that_does_not() -> None:
    scheduler, model = make_scheduler(max_num_batched_tokens=32), FakeModel(4)
    failing = add(scheduler, "failing")
    add(scheduler, "healthy")
    output = scheduler.schedule()
    tokens = model.run(output)
    tokens[failing.key] = [SampleError("no token is left")]
    scheduler.commit(output, tokens)
    assert num_found(scheduler) == 3
    scheduler.check_invariants()
    run_all(scheduler, model)
