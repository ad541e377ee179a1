"""How a step is laid out on a CUDA device: bounds that hold for every step."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.kernels.cuda_plan import SPLIT_MULTIPLE, LayerKernels, StepPlan, layer_kernels, plan_step

SHARED_BYTES_OF_THE_SMALLEST_DEVICES = 99 << 10  # sm_86, sm_89, sm_120


def _layer(*, group: int = 3, head_dim: int = 64, window: int | None = None) -> AttentionLayer:
    return AttentionLayer(2 * group, 2, head_dim, 1.0, window, None)


def _plan(
    layer: AttentionLayer, queries: list[int], longest: int, **options: int
) -> tuple[StepPlan, LayerKernels]:
    kernels = layer_kernels(layer, torch.float16, torch.float16)
    defaults = {"num_multiprocessors": 100, "deterministic": False}
    plan = plan_step(
        layer,
        kernels,
        num_tokens=sum(queries),
        num_seqs=len(queries),
        max_query_len=max(queries),
        max_seq_len=longest,
        **(defaults | options),
    )
    return plan, kernels


@given(
    queries=st.lists(st.integers(0, 200), min_size=1, max_size=20).filter(any),
    group=st.integers(1, 20),
    multiprocessors=st.integers(1, 200),
    window=st.none() | st.integers(1, 5000),
    history=st.integers(0, 5000),
    deterministic=st.booleans(),
)
def test_tiles_and_splits_cover_every_row_and_every_key(
    queries: list[int],
    group: int,
    multiprocessors: int,
    window: int | None,
    history: int,
    deterministic: bool,
) -> None:
    longest = history + max(queries)
    layer = _layer(group=group, window=window)
    plan, _ = _plan(layer, queries, longest, num_multiprocessors=multiprocessors, deterministic=deterministic)
    rows = plan.kernel.rows
    first_tiles = [sum(queries[:i]) * group // rows + i for i in range(len(queries) + 1)]
    for i, query in enumerate(queries):
        assert first_tiles[i] + math.ceil(query * group / rows) <= first_tiles[i + 1]
    assert first_tiles[-1] == plan.num_tiles

    assert plan.split_len % SPLIT_MULTIPLE == 0
    for first_row in range(0, max(queries) * group, rows):
        position = history + first_row // group
        last = history + (min(first_row + rows, max(queries) * group) - 1) // group
        lowest = 0 if window is None else max(0, position - window + 1)
        assert lowest // plan.split_len + plan.num_splits > last // plan.split_len


@given(queries=st.lists(st.integers(1, 100), min_size=1, max_size=9), longest=st.integers(100, 100_000))
def test_a_deterministic_layout_depends_on_the_layer_alone(queries: list[int], longest: int) -> None:
    layer = _layer()
    plan, kernels = _plan(layer, queries, longest, deterministic=True)
    assert plan.kernel == kernels.decode
    assert plan.split_len == _plan(layer, [1], 100, deterministic=True)[0].split_len


def test_a_step_of_many_sequences_is_not_split_and_one_long_sequence_fills_the_device() -> None:
    layer = _layer()
    assert _plan(layer, [1] * 256, 2048)[0].num_splits == 1
    plan, _ = _plan(layer, [1], 32768)
    assert plan.num_splits * layer.num_kv_heads >= 100
    assert _plan(layer, [1], 200)[0].num_splits == 1


def test_one_long_sequence_among_many_short_ones_is_split_all_the_same() -> None:
    assert _plan(_layer(), [1] * 256, 100_000)[0].split_len < 100_000


def test_a_window_bounds_the_splits_whatever_the_length() -> None:
    plan, _ = _plan(_layer(window=512), [1], 100_000)
    assert plan.num_splits * plan.split_len < 2000


def test_queries_that_fit_one_tile_run_as_a_decode() -> None:
    for queries, name in (([1], "decode"), ([5, 1], "decode"), ([6, 1], "prefill"), ([300], "prefill")):
        plan, kernels = _plan(_layer(group=3), queries, 400)
        assert plan.kernel == getattr(kernels, name)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("stored", [torch.float16, torch.int8, torch.float8_e4m3fn])
def test_shared_memory_fits_the_smallest_devices(head_dim: int, stored: torch.dtype) -> None:
    for dtype in (torch.float16, torch.float32):
        kernels = layer_kernels(_layer(head_dim=head_dim), dtype, stored)
        for kernel in (kernels.decode, kernels.prefill):
            assert kernel.shared_bytes + 1024 <= SHARED_BYTES_OF_THE_SMALLEST_DEVICES


@pytest.mark.parametrize(
    ("dtype", "stored", "head_dim", "family"),
    [
        (torch.float16, torch.float16, 64, "attend_tensor_core<__half, __half, 64, "),
        (torch.bfloat16, torch.int8, 128, "attend_tensor_core<__nv_bfloat16, int8, 128, "),
        (torch.float16, torch.float8_e4m3fn, 64, "attend_tensor_core<__half, fp8, 64, "),
        (torch.float32, torch.float8_e4m3fn, 64, "attend_plain<float, fp8, 64>"),
        (torch.float32, torch.float32, 64, "attend_plain<float, float, 64>"),
        (torch.float32, torch.float16, 64, "attend_plain<float, __half, 64>"),
        (torch.bfloat16, torch.float16, 64, "attend_plain<__nv_bfloat16, __half, 64>"),
        (torch.float16, torch.float16, 72, "attend_plain<__half, __half, 72>"),
    ],
)
def test_tensor_cores_take_what_they_can(
    dtype: torch.dtype, stored: torch.dtype, head_dim: int, family: str
) -> None:
    kernels = layer_kernels(_layer(head_dim=head_dim), dtype, stored)
    assert kernels.decode.name.startswith(family)
    assert kernels.prefill.name.startswith(family)


@pytest.mark.parametrize("head_dim", [12, 264, 512])
def test_a_head_that_no_kernel_takes_is_refused(head_dim: int) -> None:
    with pytest.raises(UsageError, match=f"no heads of {head_dim} elements"):
        layer_kernels(_layer(head_dim=head_dim), torch.float16, torch.float16)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float64, torch.float16),
        (torch.int8, torch.int8),
        (torch.float8_e4m3fn,) * 2,
        (torch.float16, torch.float64),
    ],
)
def test_a_dtype_that_no_kernel_takes_is_refused(dtype: torch.dtype, stored: torch.dtype) -> None:
    with pytest.raises(UsageError, match="the CUDA kernels have no torch"):
        layer_kernels(_layer(), dtype, stored)
