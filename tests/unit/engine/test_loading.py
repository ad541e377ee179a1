"""From a model directory to an engine: sizes that follow from it, and sizes that are refused."""

import math
from pathlib import Path

import pytest

from tessera_cli.engine.config import KVCacheDtype
from tessera_cli.engine.loading import load_engine
from tessera_cli.errors import CapacityError, UsageError


def test_from_dir_sizes_the_cache_by_bytes(tiny_model_dir: Path) -> None:
    block_bytes = 3 * 2 * 2 * 16 * 4 * 16  # layers, keys and values, heads, head_dim, float32, block_size
    engine = load_engine(tiny_model_dir, kv_cache_memory=40 * block_bytes + 1, device="cpu")
    assert engine.config.num_blocks == 40
    assert engine.config.max_model_len == 512
    assert engine.notes == []
    assert str(engine.capacity) == "39 blocks, 624 tokens, 1 sequences of 512 tokens"


def test_a_length_that_the_cache_cannot_hold_is_refused_and_never_lowered(tiny_model_dir: Path) -> None:
    with pytest.raises(CapacityError, match=r"hold 160 tokens, .* max_model_len=512"):
        load_engine(tiny_model_dir, num_blocks=11, device="cpu")
    engine = load_engine(tiny_model_dir, num_blocks=11, max_model_len=160, device="cpu")
    assert engine.config.max_model_len == 160


def test_a_cache_that_nobody_sized_holds_what_the_sequences_can_use(tiny_model_dir: Path) -> None:
    engine = load_engine(tiny_model_dir, device="cpu", max_num_seqs=4)
    assert engine.config.num_blocks == 4 * 32 + 1
    assert engine.capacity.num_full_sequences == 4


def test_only_a_cache_that_nobody_sized_is_sparing_with_memory(tiny_model_dir: Path) -> None:
    assert load_engine(tiny_model_dir, device="cpu").config.num_kept_blocks == 32
    for size in ({"num_blocks": 40}, {"kv_cache_memory": 10**7}):
        assert load_engine(tiny_model_dir, device="cpu", **size).config.num_kept_blocks is None


@pytest.mark.parametrize(("dtype", "head_bytes"), [("int8", 16 + 4), ("fp8", 16)])  # a float32 scale, or none
def test_a_smaller_cache_holds_more_tokens_in_the_same_bytes(
    dtype: KVCacheDtype, head_bytes: int, tiny_model_dir: Path
) -> None:
    block_bytes = 3 * 2 * 2 * head_bytes * 16
    engine = load_engine(tiny_model_dir, kv_cache_memory=40 * block_bytes, kv_cache_dtype=dtype, device="cpu")
    assert engine.config.num_blocks == 40
    assert engine.config.kv_cache_dtype == dtype


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"max_model_len": 513}, CapacityError, "512"),
        ({"max_model_len": 161, "num_blocks": 11}, CapacityError, "161"),
        ({"kv_cache_memory": 1000}, CapacityError, "1000"),
        ({"num_blocks": 1}, UsageError, "num_blocks=1"),
        ({"num_blocks": 40, "kv_cache_memory": 10**7}, UsageError, "both size the KV cache"),
        ({"kv_cache_dtype": "int4"}, UsageError, "int4"),
        ({"scheduling_policy": "lottery"}, UsageError, "lottery"),
        ({"gpu_memory_utilization": 0.0}, UsageError, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": math.nan, "num_blocks": 20}, UsageError, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 90, "kv_cache_memory": 10**7}, UsageError, "gpu_memory_utilization"),
        ({"attention_backend": "cuda", "device": "cpu"}, UsageError, "'cuda' does not run on cpu"),
        ({"block_size": 0}, UsageError, "block_size"),
        ({"block_size": 0, "num_blocks": 20}, UsageError, "block_size"),
        ({"dtype": "int3"}, UsageError, "int3"),
        ({"device": "abacus"}, UsageError, "abacus"),
        ({"device": "meta"}, UsageError, "meta"),
        ({"device": "cpu:0"}, UsageError, "cpu:0"),
        ({"attention_backend": "flash"}, UsageError, "flash"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100}, UsageError, "chunked"),
    ],
)
def test_from_dir_refuses_sizes_before_it_reads_weights(
    tiny_model_dir: Path,
    tmp_path: Path,
    options: dict[str, object],
    error: type[UsageError],
    match: str,
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_model_dir / "config.json").read_bytes())
    with pytest.raises(error, match=match):
        load_engine(tmp_path, **options)


@pytest.mark.parametrize("sizes", [{"kv_cache_memory": 10**15}, {"num_blocks": 10**30}])
def test_a_cache_beyond_the_memory_is_refused(tiny_model_dir: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(CapacityError, match="does not fit into the memory of cpu"):
        load_engine(tiny_model_dir, device="cpu", **sizes)
