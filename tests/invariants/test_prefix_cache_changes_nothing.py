"""The prefix cache saves work and changes no token: what is found was computed, whole, for the same text."""

from dataclasses import replace
from pathlib import Path

import pytest

from tessera_cli.engine import prefix_cache
from tessera_cli.engine.prefix_cache import PrefixCache
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.sequence import FinishReason, SampleError, Sequence
from tests.engines import greedy, make_engine, random_prompts, run_samples, tiny_decoder
from tests.factories import FakeModel, expected_tokens, make_scheduler, run_all, run_step

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


def add(
    scheduler: Scheduler, request_id: str, tokens: list[int], *, salt: str | None = None, n: int = 1
) -> Sequence:
    sequence = Sequence(request_id, tokens, replace(PARAMS, n=n), cache_salt=salt)
    scheduler.add(sequence)
    return sequence


def check_outputs(scheduler: Scheduler, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        assert sequence.token_ids == expected_tokens(
            sequence, max_model_len=scheduler.config.max_model_len
        ), sequence


def run_prompts(
    scheduler: Scheduler, model: FakeModel, prompts: list[list[int]], *, salts: list[str | None] | None = None
) -> list[int]:
    """Run the prompts one after the other and check their outputs; the tokens that each found cached."""
    cached = []
    for index, prompt in enumerate(prompts):
        sequence = add(scheduler, f"r{index}", prompt, salt=salts[index] if salts else None)
        run_all(scheduler, model)
        check_outputs(scheduler, [sequence])
        cached.append(sequence.num_cached_tokens)
    return cached


def roomy(block_size: int = 4, **sizes: int) -> Scheduler:
    return make_scheduler(num_blocks=200, block_size=block_size, max_model_len=128, **sizes)


def test_a_second_turn_finds_the_first_with_its_answer() -> None:
    scheduler, model = roomy(), FakeModel(4)
    first = add(scheduler, "first", [3] * 9)
    run_all(scheduler, model)
    # The last sampled token was never computed: 12 of 13 are.
    assert run_prompts(scheduler, model, [[*first.token_ids, 5, 6]]) == [12]
    assert (scheduler.prefix_cache.num_queries, scheduler.prefix_cache.num_hits) == (9 + 15, 12)


def test_two_identical_prompts_in_one_step_find_nothing_that_is_not_computed() -> None:
    scheduler, model = roomy(), FakeModel(4)
    twins = [add(scheduler, name, [3] * 7) for name in "ab"]
    output, _ = run_step(scheduler, model)
    assert [item.start for item in output.scheduled] == [0, 0]
    run_all(scheduler, model)
    check_outputs(scheduler, twins)


@pytest.mark.parametrize("how", ["abort", "abort and rollback", "rollback"])
def test_what_was_scheduled_and_never_committed_is_not_found(how: str) -> None:
    scheduler, model = roomy(), FakeModel(4)
    add(scheduler, "gone", [3] * 14)
    output = scheduler.schedule()
    if "abort" in how:
        scheduler.abort("gone")
    model.fail(output)
    if "rollback" in how:
        scheduler.rollback()
        scheduler.abort("gone")
    else:
        scheduler.commit(output, {("gone", 0): [1]} if output.scheduled[0].samples else {})
    scheduler.check_invariants()
    assert run_prompts(scheduler, model, [[3] * 14]) == [0]


def test_an_evicted_prefix_is_missed_when_its_blocks_hold_something_else() -> None:
    scheduler, model = make_scheduler(), FakeModel(4)  # 8 blocks
    assert run_prompts(scheduler, model, [[3] * 12, [5] * 28, [3] * 12]) == [0, 0, 0]


@pytest.mark.parametrize("position", [15, 16, 17])
def test_prompts_that_differ_in_one_token_find_each_their_own(position: int) -> None:
    scheduler, model = roomy(block_size=16), FakeModel(16)
    one = [3] * 40
    other = [*one[:position], 4, *one[position + 1 :]]
    shared = position // 16 * 16
    assert run_prompts(scheduler, model, [one, other, one, other]) == [0, shared, 32, 32]


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_prompt_of_whole_blocks_can_be_repeated(length: int) -> None:
    scheduler, model = roomy(block_size=16), FakeModel(16)
    assert run_prompts(scheduler, model, [[3] * length] * 3) == [0, length - 16, length - 16]


@pytest.mark.parametrize("length", range(9, 18))
def test_a_victim_may_be_at_any_offset_of_a_block(length: int) -> None:
    scheduler, model = make_scheduler(max_num_batched_tokens=32), FakeModel(4)
    params = replace(PARAMS, max_tokens=14)
    sequences = [Sequence("old", [3] * 11, params), Sequence("new", [4] * length, params)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_all(scheduler, model)
    assert scheduler.num_preemptions > 0
    check_outputs(scheduler, sequences)


def test_a_victim_is_not_computed_again_where_its_blocks_are_still_there() -> None:
    scheduler, model = make_scheduler(max_num_batched_tokens=32), FakeModel(4)
    old, new = (Sequence(name, [ord(name) % 20] * 15, PARAMS) for name in "ab")
    for sequence in (old, new):
        scheduler.add(sequence)
    while not scheduler.num_preemptions:
        output, _ = run_step(scheduler, model)
    assert output.preempted == (new,)
    while new.num_cached_tokens == 0:
        output, _ = run_step(scheduler, model)
    assert output.scheduled[-1].start == 12  # all but the block that was taken
    run_all(scheduler, model)
    check_outputs(scheduler, [old, new])


@pytest.mark.parametrize("tokens_in_digest", [0, 1])
def test_colliding_digests_change_no_output(monkeypatch: pytest.MonkeyPatch, tokens_in_digest: int) -> None:
    monkeypatch.setattr(prefix_cache, "root_digest", lambda **fields: b"")
    monkeypatch.setattr(prefix_cache, "block_digest", lambda parent, tokens: bytes(tokens[:tokens_in_digest]))
    scheduler, model = roomy(), FakeModel(4)
    prompts = [[3] * 12, [4] * 12, [3, 3, 3, 4] * 3, [3] * 9 + [4] * 4]
    run_prompts(scheduler, model, prompts * 2, salts=[None, "a", "b", None] * 2)


def test_salts_find_their_own_and_nothing_of_others() -> None:
    scheduler, model = roomy(), FakeModel(4)
    salts = ["a", "b", None, "a", "b", None]
    assert run_prompts(scheduler, model, [[3] * 9] * 6, salts=salts) == [0, 0, 0, 8, 8, 8]


def test_who_wants_prompt_logprobs_computes_every_token_and_leaves_it_to_others() -> None:
    scheduler, model = roomy(), FakeModel(4)
    wanting = replace(PARAMS, prompt_logprobs=0)
    for request_id in "ab":
        sequence = Sequence(request_id, [3] * 9, wanting)
        scheduler.add(sequence)
        run_all(scheduler, model)
        assert sequence.num_cached_tokens == 0
    assert scheduler.prefix_cache.num_queries == 0
    assert run_prompts(scheduler, model, [[3] * 9]) == [8]


def test_who_wants_logprobs_from_a_position_on_finds_what_does_not_predict_them() -> None:
    scheduler, model = roomy(), FakeModel(4)
    run_prompts(scheduler, model, [[3] * 17])
    found = []
    for start in range(18):
        params = replace(PARAMS, prompt_logprobs=0, prompt_logprobs_start=start)
        sequence = Sequence(f"from {start}", [3] * 17, params)
        scheduler.add(sequence)
        run_all(scheduler, model)
        found.append(sequence.num_cached_tokens)
        # The token before the first wanted one is computed: its row predicts it.
        assert found[-1] <= max(0, start - 1)
    assert found == [0] * 5 + [4] * 4 + [8] * 4 + [12] * 4 + [16]


def test_nothing_of_a_sequence_that_failed_is_found() -> None:
    scheduler, model = roomy(max_num_batched_tokens=8), FakeModel(4)
    failing = add(scheduler, "bad", [3] * 14)
    run_step(scheduler, model)  # eight tokens are computed and published before it fails
    assert len(scheduler.prefix_cache) == 2
    output = scheduler.schedule()
    assert scheduler.commit(output, {("bad", 0): [SampleError("not finite")]}) == [failing]
    assert len(scheduler.prefix_cache) == 0
    scheduler.check_invariants()
    assert run_prompts(scheduler, model, [[3] * 14]) == [0]


def test_after_a_reset_nothing_computed_before_is_found_not_even_of_who_runs_on() -> None:
    scheduler, model = roomy(), FakeModel(4)
    add(scheduler, "done", [3] * 9)
    run_all(scheduler, model)
    running = add(scheduler, "running", [5] * 6)
    run_step(scheduler, model)
    scheduler.reset_prefix_cache()
    assert scheduler.block_pool.num_cached_blocks == 0
    run_all(scheduler, model)
    assert run_prompts(scheduler, model, [[3] * 9, running.token_ids, [3] * 9]) == [0, 0, 8]


def test_without_caching_nothing_is_kept() -> None:
    scheduler, model = roomy(enable_prefix_caching=False), FakeModel(4)
    assert run_prompts(scheduler, model, [[3] * 9] * 2) == [0, 0]
    assert (len(scheduler.prefix_cache), scheduler.prefix_cache.num_queries) == (0, 0)


def test_the_salt_of_a_request_reaches_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    find = PrefixCache.find
    monkeypatch.setattr(
        PrefixCache, "find", lambda self, sequence: seen.append(sequence.cache_salt) or find(self, sequence)
    )
    scheduler, model = roomy(), FakeModel(4)
    add(scheduler, "a", [3] * 9, salt="x", n=2)
    finished = run_all(scheduler, model)
    assert seen == ["x"]
    assert {sequence.cache_salt for sequence in finished} == {"x"}


@pytest.mark.parametrize("sizes", [{}, {"num_blocks": 34}, {"max_num_batched_tokens": 9}])
def test_an_engine_with_and_without_it_gives_the_same_tokens(
    tiny_model_dir: Path, sizes: dict[str, int]
) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    prefix, *tails = random_prompts([37, 1, 3, 8, 20])
    prompts = [prefix + tail for tail in tails] + [prefix, prefix[:32], prefix[:16], tails[3]]

    def answers(*, caches: bool) -> list[list[list[int]]]:
        engine = make_engine(decoder, enable_prefix_caching=caches, **sizes)
        found: list[list[list[int]]] = []
        for turn in range(2):
            for index, prompt in enumerate(prompts):
                params = replace(greedy(9), n=1 + index % 3, temperature=index % 2, seed=index)
                engine.add_request(str(index), prompt + (found[index][0] if turn else []), params)
            outputs = run_samples(engine)
            assert all(one.finish_reason is FinishReason.LENGTH for many in outputs.values() for one in many)
            found += [[one.token_ids for one in outputs[str(index)]] for index in range(len(prompts))]
        assert (engine.stats().prefix_cache_hits > 0) == caches
        return found

    assert answers(caches=True) == answers(caches=False)
