"""Sizes that cannot work are refused at once, with the numbers and the way out."""

from dataclasses import replace
from typing import Any

import pytest

from tessera_cli.engine.config import EngineConfig
from tessera_cli.errors import CapacityError, UsageError


def test_the_pool_must_hold_max_model_len_beside_the_null_block() -> None:
    EngineConfig(num_blocks=5, max_model_len=64)
    EngineConfig(num_blocks=5, max_model_len=49)
    with pytest.raises(CapacityError) as caught:
        EngineConfig(num_blocks=5, max_model_len=65)
    assert "max_model_len=65 needs 5" in caught.value.message
    assert "num_blocks=5 has 4" in caught.value.message
    assert caught.value.hint is not None
    for way_out in ("more memory", "smaller dtype", "max_model_len to at most 64"):
        assert way_out in caught.value.hint


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 32, 33])
def test_blocks_waste_less_than_one_block(num_tokens: int) -> None:
    num_blocks = EngineConfig(num_blocks=5, max_model_len=64).blocks_for(num_tokens)
    assert 0 <= num_blocks * 16 - num_tokens <= 15


@pytest.mark.parametrize(
    "name", ["num_blocks", "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens"]
)
@pytest.mark.parametrize("value", [0, -1, 64.0, "64", True, None])
def test_sizes_that_are_no_whole_number_above_zero_are_refused_by_name(name: str, value: Any) -> None:
    sizes: dict[str, Any] = {"num_blocks": 5, "max_model_len": 64, name: value}
    with pytest.raises(UsageError, match=f"{name}={value!r}"):
        EngineConfig(**sizes)


@pytest.mark.parametrize("value", [-1, 2.0, "2", True])
def test_what_is_kept_is_a_count_or_all(value: Any) -> None:
    with pytest.raises(UsageError, match=f"num_kept_blocks={value!r}"):
        EngineConfig(num_blocks=5, max_model_len=64, num_kept_blocks=value)
    for kept in (0, None):
        assert EngineConfig(num_blocks=5, max_model_len=64, num_kept_blocks=kept).num_kept_blocks == kept


def test_without_chunks_a_whole_prompt_must_fit_into_a_step() -> None:
    config = EngineConfig(
        num_blocks=5, max_model_len=64, max_num_batched_tokens=64, enable_chunked_prefill=False
    )
    with pytest.raises(UsageError, match="max_num_batched_tokens is 63"):
        replace(config, max_num_batched_tokens=63)
    replace(config, max_num_batched_tokens=63, enable_chunked_prefill=True)


@pytest.mark.parametrize("name", ["scheduling_policy", "kv_cache_dtype"])
def test_choices_that_do_not_exist_are_refused_with_those_that_do(name: str) -> None:
    options: dict[str, Any] = {name: "fastest"}
    with pytest.raises(UsageError, match=f"{name}='fastest'") as caught:
        EngineConfig(num_blocks=5, max_model_len=64, **options)
    assert caught.value.hint is not None
    assert {"scheduling_policy": "fcfs, priority", "kv_cache_dtype": "int8, fp8"}[name] in caught.value.hint


@pytest.mark.parametrize(("max_num_seqs", "budget", "slots"), [(3, 8, 3), (8, 3, 3)])
def test_each_running_sequence_needs_a_token_of_the_budget(
    max_num_seqs: int, budget: int, slots: int
) -> None:
    config = EngineConfig(
        num_blocks=5, max_model_len=64, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )
    assert config.max_num_slots == slots
