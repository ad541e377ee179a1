"""How many KV blocks an engine gets, and what it refuses to start with."""

import pytest
import torch

from tessera_cli.attention import AttentionLayer
from tessera_cli.engine.memory import DeviceMemory
from tessera_cli.engine.sizing import PoolSizing, check_utilization
from tessera_cli.errors import CapacityError, UsageError

GIB = 1 << 30
# SmolLM2-135M: 30 layers of 3 key-value heads of 64, 46,080 bytes a token in float32.
SMOLLM2 = (AttentionLayer(9, 3, 64, 0.125, None, None),) * 30
SMOLLM2_WEIGHTS = 134_515_008 * 4
TOKEN = 46_080


def _pool(
    *, dtype: torch.dtype = torch.float32, block_size: int = 16, max_model_len: int = 8192
) -> PoolSizing:
    return PoolSizing(SMOLLM2, dtype, block_size, max_model_len)


def _from_free(
    pool: PoolSizing, memory: DeviceMemory, *, device: str = "cpu", seqs: int = 256, utilization: float = 0.9
) -> int:
    return pool.blocks_from_free(
        device, memory, weight_bytes=SMOLLM2_WEIGHTS, max_num_seqs=seqs, utilization=utilization
    )


def test_smollm2_runs_at_full_length_on_a_machine_with_4_gb_free() -> None:
    num_blocks = _from_free(_pool(), DeviceMemory(8 * 10**9, 4 * 10**9))
    assert (num_blocks - 1) * 16 >= 4 * 8192
    assert num_blocks * 16 * TOKEN <= (4 * 10**9 - SMOLLM2_WEIGHTS) / 2


def test_a_cpu_pool_is_no_larger_than_its_sequences_can_use() -> None:
    memory = DeviceMemory(512 * GIB, 500 * GIB)
    assert _from_free(_pool(), memory, seqs=3) == 3 * 512 + 1
    assert _from_free(_pool(max_model_len=17), memory, seqs=3) == 3 * 2 + 1


@pytest.mark.parametrize("utilization", [0.3, 0.9, 1.0])
def test_a_gpu_pool_weights_and_other_processes_stay_within_the_share(utilization: float) -> None:
    memory = DeviceMemory(80 * GIB, 73 * GIB)
    num_blocks = _from_free(_pool(), memory, device="cuda", utilization=utilization, seqs=1000)
    taken = num_blocks * 16 * TOKEN + SMOLLM2_WEIGHTS + 7 * GIB
    assert 0 <= 80 * GIB * utilization - taken < 2 * 16 * TOKEN


@pytest.mark.parametrize("utilization", [0.0, -0.1, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(utilization: float) -> None:
    with pytest.raises(UsageError, match="gpu_memory_utilization"):
        check_utilization(utilization)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_that_the_weights_fill_holds_no_pool(device: str) -> None:
    with pytest.raises(CapacityError, match="a KV cache of 0 bytes holds 0 tokens"):
        _from_free(_pool(), DeviceMemory(GIB // 2, GIB // 2), device=device)


@pytest.mark.parametrize(
    ("dtype", "token_bytes"),
    [
        (torch.float32, TOKEN),
        (torch.float16, TOKEN // 2),
        (torch.bfloat16, TOKEN // 2),
        (torch.int8, 12_240),
        (torch.float8_e4m3fn, TOKEN // 4),
    ],
)
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_bytes_become_blocks_of_the_caches_dtype(
    dtype: torch.dtype, token_bytes: int, block_size: int
) -> None:
    pool, memory = _pool(dtype=dtype, block_size=block_size), DeviceMemory(80 * GIB, 1)
    block = token_bytes * block_size
    assert pool.blocks_from_bytes(2000 * block, "cpu", memory) == 2000
    assert pool.blocks_from_bytes(2001 * block - 1, "cpu", memory) == 2000


def test_a_pool_below_max_model_len_is_refused_with_what_mends_it() -> None:
    memory = DeviceMemory(8 * GIB, 8 * GIB)
    with pytest.raises(CapacityError) as caught:
        _pool().blocks_from_bytes(200 << 20, "cpu", memory)
    assert caught.value.message == (
        "a KV cache of 209715200 bytes holds 4528 tokens, and one sequence has up to max_model_len=8192"
    )
    assert caught.value.hint == (
        "raise kv_cache_memory to at least 361MiB or lower max_model_len to at most 4528"
        " or set kv_cache_dtype to float16 or bfloat16 or int8 or fp8"
    )
    # Each remedy is enough.
    assert _pool().blocks_from_bytes(361 << 20, "cpu", memory) >= 513
    assert _pool(max_model_len=4528).blocks_from_bytes(200 << 20, "cpu", memory) == 284
    for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        assert _pool(dtype=dtype).blocks_from_bytes(200 << 20, "cpu", memory) >= 513


def test_remedies_that_would_not_help_are_not_offered() -> None:
    memory = DeviceMemory(8 * GIB, 8 * GIB)
    with pytest.raises(CapacityError) as caught:
        _pool().blocks_from_bytes(1000, "cpu", memory)
    assert caught.value.hint == "raise kv_cache_memory to at least 361MiB"
    with pytest.raises(CapacityError) as caught:
        _pool().blocks_from_bytes(100 << 20, "cpu", memory)
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("at most 2256 or set kv_cache_dtype to int8 or fp8")


def test_blocks_are_taken_as_given_or_refused() -> None:
    memory = DeviceMemory(8 * GIB, 1)
    assert _pool().checked_blocks(513, "cpu", memory) == 513
    with pytest.raises(CapacityError, match="num_blocks=512 hold 8176 tokens") as caught:
        _pool().checked_blocks(512, "cpu", memory)
    assert caught.value.hint == "raise num_blocks to at least 513 or lower max_model_len to at most 8176"
    with pytest.raises(UsageError, match="num_blocks=1 "):
        _pool().checked_blocks(1, "cpu", memory)


def test_a_pool_beyond_all_memory_is_refused() -> None:
    memory = DeviceMemory(GIB, GIB)
    most = GIB // (16 * TOKEN)
    assert _pool().checked_blocks(most, "cpu", memory) == most
    with pytest.raises(CapacityError, match="does not fit into the memory of cpu, 1024MiB") as caught:
        _pool().checked_blocks(most + 1, "cpu", memory)
    assert caught.value.hint == f"lower kv_cache_memory or num_blocks; {most} blocks are the most"
