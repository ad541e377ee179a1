"""Requests that are dropped at any moment give all their blocks back and leave the others as they were."""

import random
from pathlib import Path

import pytest

from tests.engines import (
    Finished,
    greedy,
    make_engine,
    random_prompts,
    run_requests,
    run_to_end,
    tiny_decoder,
)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5, 9])
def test_abort_after_any_number_of_steps(tiny_model_dir: Path, num_steps: int) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    sizes = {"num_blocks": 14, "max_model_len": 52, "max_num_batched_tokens": 8}
    prompts = random_prompts([14, 11, 6])
    requests = {name: (prompt, greedy(12)) for name, prompt in zip("abc", prompts, strict=True)}
    expected = run_requests(make_engine(decoder, **sizes), requests)
    for victim in requests:
        engine = make_engine(decoder, **sizes)
        for request_id, (prompt, params) in requests.items():
            engine.add_request(request_id, prompt, params)
        begun = {request_id: Finished() for request_id in requests}
        for _ in range(num_steps):
            for output in engine.step():
                begun[output.request_id].token_ids += output.new_token_ids
        assert engine.abort(victim)
        assert not engine.abort(victim)
        engine._scheduler.check_invariants()
        rest = run_to_end(engine)
        assert victim not in rest
        for request_id, finished in rest.items():
            assert begun[request_id].token_ids + finished.token_ids == expected[request_id].token_ids


def test_storm(tiny_model_dir: Path) -> None:
    chance = random.Random(0)
    engine = make_engine(
        tiny_decoder(tiny_model_dir),
        num_blocks=14,
        max_model_len=52,
        max_num_batched_tokens=8,
        max_num_seqs=4,
    )
    live: set[str] = set()
    for number in range(150):
        if len(live) < 6:
            request_id = str(number)
            engine.add_request(
                request_id, random_prompts([chance.randint(1, 30)])[0], greedy(chance.randint(1, 9))
            )
            live.add(request_id)
        for output in engine.step():
            if output.finish_reason is not None:
                live.remove(output.request_id)
        if live and chance.random() < 0.4:
            victim = chance.choice(sorted(live))
            assert engine.abort(victim)
            live.remove(victim)
        engine._scheduler.check_invariants()
    assert engine.stats().num_preemptions > 0
    for request_id in live:
        assert engine.abort(request_id)
    assert not engine.has_unfinished()
    assert engine.stats().num_used_blocks == 0
    assert not engine._records.requests


def test_ids_are_matched_whole(tiny_model_dir: Path) -> None:
    engine = make_engine(tiny_decoder(tiny_model_dir))
    engine.add_request("ab", [5], greedy(2))
    assert not engine.abort("a")
    assert len(run_to_end(engine)["ab"].token_ids) == 2
    assert not engine.abort("ab")
