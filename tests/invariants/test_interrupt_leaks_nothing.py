"""Ctrl-C between any two lines of a step leaves an engine whose books balance and that goes on."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tessera_cli.engine.engine import Engine
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.models.decoder import Decoder
from tests.engines import greedy, make_engine, run_to_end, tiny_decoder

PROMPTS = {"a": [5] * 6, "b": [6] * 3, "c": [7] * 9, "d": [8] * 2}
FILES = ("engine.py", "scheduler.py", "block_pool.py", "sequence.py")


def fake_run(output: SchedulerOutput) -> dict[str, int]:
    """A token that depends on nothing but the sequence, as greedy tokens do."""
    sampling = [item.sequence for item in output.scheduled if item.samples]
    return {sequence.request_id: sum(sequence.token_ids) % 300 for sequence in sampling}


def engine_before_step(decoder: Decoder, number: int, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that is short of blocks, after `number` steps."""
    engine = make_engine(decoder, num_blocks=7, max_model_len=24, max_num_batched_tokens=10)
    monkeypatch.setattr(engine._runner, "run", fake_run)
    for request_id, prompt in PROMPTS.items():
        engine.add_request(request_id, prompt, greedy(3 + len(prompt)))
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


def interrupted(path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The engine after its step `number` was cut at its first line, at its second, and so on."""
    decoder = tiny_decoder(path)
    line = 1
    while interrupt_at(line, (engine := engine_before_step(decoder, number, monkeypatch)).step):
        engine._scheduler.check_invariants()
        yield engine
        line += 1
    assert line > 50


@pytest.mark.parametrize("number", [0, 1, 4, 6, 9])
def test_requests_can_be_dropped_after_it(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for engine in interrupted(tiny_model_dir, number, monkeypatch):
        for request_id in PROMPTS:
            engine.abort(request_id)
            engine._scheduler.check_invariants()
        assert not engine._requests
        assert engine.stats().num_used_blocks == 0
        engine.add_request("new", [9, 9], greedy(2))
        assert run_to_end(engine)["new"].token_ids == [18, 36]


def test_requests_go_on_after_it(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in interrupted(tiny_model_dir, 4, monkeypatch):
        sequences = list(engine._scheduler._sequences.values())
        while engine.has_unfinished():
            engine.step()
            engine._scheduler.check_invariants()
        for sequence in sequences:
            expected = list(PROMPTS[sequence.request_id])
            while len(expected) < sequence.num_prompt_tokens + sequence.params.max_tokens:
                expected.append(sum(expected) % 300)
            assert sequence.token_ids == expected
