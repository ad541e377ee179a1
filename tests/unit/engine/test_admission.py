"""What could never run, or would break the engine for all, is refused before anything changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera_cli.engine.admission import check_prompt
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import TesseraError, UsageError
from tests.engines import greedy, make_engine, run_to_end, tiny_decoder


@pytest.fixture
def engine(tiny_model_dir: Path) -> Engine:
    return make_engine(tiny_decoder(tiny_model_dir), scheduling_policy="priority")


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([], {}),
        ([5.0] * 9, {}),
        (["5"], {}),
        ([None], {}),
        (5, {}),
        ([384], {}),
        ([-1], {}),
        ([5] * 128, {}),
        ([5] * 9, {"priority": "high"}),
        ([5] * 9, {"priority": float("nan")}),
        ([5] * 9, {"priority": None}),
        ([5] * 9, {"cache_salt": b"salt"}),
        ([5] * 9, {"cache_salt": 1}),
        ([5] * 9, {"request_id": "first"}),
        ([5] * 9, {"params": SamplingParams(prompt_logprobs=0, prompt_logprobs_start=10)}),
    ],
)
def test_a_refused_request_leaves_the_others_and_the_cache_alone(
    engine: Engine, prompt: Any, options: dict[str, Any]
) -> None:
    for request_id in ("before", "first"):
        engine.add_request(request_id, [6] * 9, greedy(3))
        if request_id == "before":
            run_to_end(engine)
    engine.step()
    with pytest.raises(TesseraError):
        engine.add_request(**{"request_id": "bad", "prompt_token_ids": prompt, "params": greedy(4)} | options)
    assert engine.stats().prefix_cache_hits == 8
    assert engine._scheduler.num_running == 1  # the first goes on with its blocks
    engine.add_request("last", [7] * 2, greedy(3))
    assert [len(one.token_ids) for one in run_to_end(engine).values()] == [2, 3]


@pytest.mark.parametrize("salt", ["", "\ud800", "\0"])
def test_any_text_is_a_salt(engine: Engine, salt: str) -> None:
    for request_id, own in (("none", None), ("a", salt), ("b", salt)):
        engine.add_request(request_id, [6] * 9, greedy(3), cache_salt=own)
        run_to_end(engine)
    assert engine.stats().prefix_cache_hits == 8


def test_prompt_logprobs_may_start_anywhere_in_the_prompt_and_behind_its_last_token(engine: Engine) -> None:
    for start in range(10):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=start)
        engine.add_request("r", [5] * 9, params)
        told = run_to_end(engine)["r"].prompt_logprobs
        assert [one is not None for one in told or ()] == [index >= max(start, 1) for index in range(9)]


def test_whatever_counts_is_a_token_id() -> None:
    assert check_prompt(iter(np.array([3, 4])), vocab_size=5) == [3, 4]
    assert all(type(token) is int for token in check_prompt(np.array([3, 4]), vocab_size=5))
    with pytest.raises(UsageError, match="token id 5"):
        check_prompt([3, 5], vocab_size=5)
