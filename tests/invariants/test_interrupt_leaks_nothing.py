"""Ctrl-C between any two lines of a step leaves an engine whose books balance and that goes on."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tessera_cli.engine.engine import Engine
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import FinishReason, Sequence, SequenceKey
from tessera_cli.engine.step_result import StepResult
from tessera_cli.models.decoder import Decoder
from tests.engines import greedy, make_engine, run_samples, run_to_end, tiny_decoder

# The second one forks, and the last one begins like the first.
PROMPTS = {"a": [5] * 6, "b": [6] * 3, "c": [7] * 9, "d": [5] * 5}
NUM_SAMPLES = {"a": 1, "b": 3, "c": 1, "d": 1}
FILES = (
    "engine/engine.py",
    "engine/scheduler.py",
    "engine/step_plan.py",
    "engine/step_undo.py",
    "engine/admission.py",
    "engine/queues.py",
    "engine/block_pool.py",
    "engine/prefix_cache.py",
    "engine/sequence.py",
    "engine/request_records.py",
    "engine/live_request.py",
)


def next_token(token_ids: list[int], child_index: int) -> int:
    """A token that depends on nothing but the sequence, as greedy tokens do."""
    return (sum(token_ids) + child_index) % 300


def fake_run(output: SchedulerOutput, matchers: object) -> StepResult:
    return StepResult(
        {
            item.sequence.key: [
                next_token(item.sequence.token_ids, item.sequence.child_index + index)
                for index in range(item.num_samples)
            ]
            for item in output.scheduled
            if item.num_samples
        }
    )


def engine_before_step(decoder: Decoder, number: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that is short of blocks, after `number` steps."""
    engine = make_engine(decoder, num_blocks=8, max_model_len=24, max_num_batched_tokens=10)
    monkeypatch.setattr(engine._runner, "run", fake_run)
    for request_id, prompt in PROMPTS.items():
        params = replace(greedy(3 + len(prompt)), n=NUM_SAMPLES[request_id])
        engine.add_request(request_id, prompt, params)
    for _ in range(number):
        engine.step()
    return engine


def interrupt_at(line: int, step: Callable[[], object]) -> bool:
    """Run `step` with a Ctrl-C before its `line`-th line; False if it has fewer."""
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupted(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch, act: Callable[[Engine], object] = Engine.step
) -> Iterator[Engine]:
    """The engine after `number` steps and an `act` that was cut at its first line, its second, and so on."""
    decoder = tiny_decoder(path)
    line = 1
    while interrupt_at(line, partial(act, engine := engine_before_step(decoder, number, monkeypatch))):
        engine._scheduler.check_invariants()
        yield engine
        line += 1
    assert line > 50


def finish_all_samples(engine: Engine) -> None:
    for index in range(NUM_SAMPLES["b"]):
        engine.finish("b", index)


@pytest.mark.parametrize(
    "act",
    [
        lambda engine: engine.abort("a"),
        lambda engine: engine.abort("b"),
        finish_all_samples,
        lambda engine: engine.add_request("new", [3] * 5, greedy(3)),
        lambda engine: engine.reset_prefix_cache(),
    ],
    ids=["abort", "abort samples", "finish", "add", "reset"],
)
def test_a_call_between_steps_leaves_it_done_or_not_begun(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[Engine], object]
) -> None:
    for engine in interrupted(tiny_model_dir, 2, monkeypatch, act):
        live = set(engine._records.requests)
        assert set(engine._scheduler.queues.requests) == live
        outputs = run_samples(engine)
        assert set(outputs) == live
        last = [samples[-1].finish_reason for samples in outputs.values()]
        assert last == [FinishReason.LENGTH] * len(live)


def live(engine: Engine) -> dict[SequenceKey, Sequence]:
    return {sequence.key: sequence for sequence in engine._scheduler.queues.live()}


@pytest.mark.parametrize("number", [0, 1, 4, 6, 9])
def test_requests_can_be_dropped_after_it(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for engine in interrupted(tiny_model_dir, number, monkeypatch):
        for request_id in PROMPTS:
            engine.abort(request_id)
            engine._scheduler.check_invariants()
        assert not engine._records.requests
        assert engine.stats().num_used_blocks == 0
        engine.add_request("new", [9, 9], greedy(2))
        assert run_to_end(engine)["new"].token_ids == [18, 36]


@pytest.mark.parametrize("number", [0, 1, 4])
def test_requests_go_on_after_it(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    for engine in interrupted(tiny_model_dir, number, monkeypatch):
        before = {request_id for request_id, _ in live(engine)}
        seen = live(engine)
        while engine.has_unfinished():
            engine.step()
            engine._scheduler.check_invariants()
            seen |= live(engine)
        assert not engine._records.requests
        if number < 4:
            assert {key for key in seen if key[0] in before} == {
                (request_id, index) for request_id in before for index in range(NUM_SAMPLES[request_id])
            }
        for sequence in seen.values():
            expected = list(PROMPTS[sequence.request_id])
            while len(expected) < sequence.num_prompt_tokens + sequence.params.max_tokens:
                expected.append(next_token(expected, sequence.child_index))
            assert sequence.token_ids == expected
