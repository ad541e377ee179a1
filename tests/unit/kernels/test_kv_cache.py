"""How keys and values are stored."""

import pytest
import torch

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.kernels.kv_cache import (
    KV_CACHE_DTYPES,
    PagedTensor,
    kv_block_bytes,
    quantise,
    select_kv_cache_dtype,
    to_fp8,
)

_LAYER = AttentionLayer(6, 2, 16, 0.25, None, None)
_OTHER = AttentionLayer(4, 4, 8, 0.25, 3, None)


def _paged(dtype: torch.dtype, *, num_blocks: int = 5) -> PagedTensor:
    return PagedTensor(_LAYER, num_blocks=num_blocks, block_size=4, dtype=dtype, device="cpu")


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_a_block_takes_the_bytes_that_it_is_said_to_take(name: str) -> None:
    dtype = KV_CACHE_DTYPES[name]
    held = 0
    for layer in (_LAYER, _OTHER, _OTHER):
        keys = PagedTensor(layer, num_blocks=1, block_size=4, dtype=dtype, device="cpu")
        held += 2 * sum(tensor.nbytes for tensor in (keys.elements, keys.scales) if tensor is not None)
    assert kv_block_bytes([_LAYER, _OTHER, _OTHER], block_size=4, dtype=dtype) == held


def test_the_cache_has_the_models_dtype_unless_told_otherwise() -> None:
    assert select_kv_cache_dtype("auto", torch.bfloat16) is torch.bfloat16
    assert select_kv_cache_dtype("int8", torch.bfloat16) is torch.int8
    with pytest.raises(UsageError, match="'int4'"):
        select_kv_cache_dtype("int4", torch.float32)


def test_quantised_elements_are_off_by_at_most_half_a_scale() -> None:
    x = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(0))
    x[7] *= 1e-30
    x[8] *= 1e30
    steps, scales = quantise(x)
    assert steps.dtype == torch.int8
    assert scales.shape == (50, 3)
    assert torch.equal(steps.abs().amax(-1), torch.full((50, 3), 127, dtype=torch.int8))
    error = (steps.double() * scales.double()[..., None] - x.double()).abs()
    assert bool((error <= 0.5001 * scales.double()[..., None]).all())


def test_rows_of_zeros_stay_zero_and_rows_that_are_not_finite_become_nan() -> None:
    x = torch.zeros(4, 8)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    x[3] = 5.0
    steps, scales = quantise(x)
    back = steps * scales[:, None]
    assert torch.equal(back[0], x[0])
    assert bool(back[1:3].isnan().all())
    torch.testing.assert_close(back[3], x[3])


def test_fp8_is_the_nearest_of_its_numbers_and_nothing_beyond_the_largest() -> None:
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes.float()
    stored = to_fp8(numbers)
    assert torch.equal(stored.view(torch.uint8)[:-1], codes.view(torch.uint8)[:-1])
    assert bool(stored[-1].float().isnan())  # whose sign does not matter
    numbers = numbers[numbers.isfinite()]
    x = torch.cat([torch.linspace(-464, 464, 9973), torch.linspace(-0.05, 0.05, 9973)])
    distances = (x[:, None] - numbers).abs()
    assert torch.equal((x - to_fp8(x).float()).abs(), distances.amin(1))
    # Between two neighbours that whose last bit is 0.
    whole = torch.tensor([8.5, 9.5, 10.5, 464.0, -464.0, 2**-10, 3 * 2**-10])
    assert to_fp8(whole).float().tolist() == [8, 10, 10, 448, -448, 0, 2**-8]
    assert bool(to_fp8(torch.tensor([464.01, -465, 1e9, torch.inf, -torch.inf, torch.nan])).isnan().all())


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_what_is_written_is_read_back_in_any_order(name: str) -> None:
    paged = _paged(KV_CACHE_DTYPES[name])
    rows = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(0))
    paged.write(torch.tensor([19, 4, 7]), rows)
    back = paged.read(torch.tensor([[4, 19], [7, 4]]), torch.float32)
    assert back.dtype == torch.float32
    expected = rows[torch.tensor([[1, 0], [2, 1]])]
    assert float((back - expected).norm() / expected.norm()) < (0.03 if name == "fp8" else 0.01)
    assert not paged.elements[0].any()


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_the_null_block_is_zero_whatever_the_memory_held(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, 72, **options))
    paged = _paged(KV_CACHE_DTYPES[name])
    assert bool((paged.elements[1:] == 72).all())
    assert not paged.read(torch.arange(4), torch.float32).any()
    assert not paged.elements[0].any()
