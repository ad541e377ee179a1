"""The compiled elementwise operators against plain torch."""

import pytest
import torch
from torch import Tensor

from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
from tessera_cli.kernels.cpu_operators import CpuOperators
from tessera_cli.models.layers import RMSNorm
from tessera_cli.models.operators import TorchOperators

_LIBRARY = load_library()
pytestmark = pytest.mark.skipif(not isinstance(_LIBRARY, CpuLibrary), reason=str(_LIBRARY))
# The plain versions round in between as well, so 16-bit results may differ in their last place.
_TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
_SHAPES = [(1, 8), (3, 24), (7, 576), (64, 1536), (33, 2048)]

_dtypes = pytest.mark.parametrize("dtype", list(_TOLERANCES), ids=str)


@pytest.fixture
def operators() -> CpuOperators:
    assert isinstance(_LIBRARY, CpuLibrary)
    return CpuOperators(_LIBRARY)


@_dtypes
@pytest.mark.parametrize("shape", _SHAPES)
def test_add_rms_norm_equals_torch(
    operators: CpuOperators, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, update, norm = _randn(dtype, *shape), _randn(dtype, *shape) * 3, _norm(dtype, shape[1])
    before = x.clone()
    expected_sum, expected = TorchOperators().add_rms_norm(x, update.clone(), norm)
    total, normed = operators.add_rms_norm(x, update, norm)
    _assert_close(normed, expected)
    assert torch.equal(total, expected_sum)
    assert torch.equal(x, before)


@_dtypes
@pytest.mark.parametrize("shape", _SHAPES)
def test_rms_norm_equals_torch_and_leaves_its_input(
    operators: CpuOperators, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, norm = _randn(dtype, *shape) * 5, _norm(dtype, shape[1])
    before = x.clone()
    _assert_close(operators.rms_norm(x, norm), TorchOperators().rms_norm(x, norm))
    assert torch.equal(x, before)


@_dtypes
@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 4, 8), (5, 12, 64), (70, 12, 64), (9, 3, 24)])
def test_rotate_equals_torch_and_leaves_other_heads(
    operators: CpuOperators, dtype: torch.dtype, tokens: int, heads: int, head_dim: int
) -> None:
    angles = torch.randn(tokens, 1, head_dim // 2)
    cos = torch.cat([angles.cos(), angles.cos()], -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    rows = _randn(dtype, tokens, heads + 3, head_dim)
    packed = rows[:, : heads + 2]  # a view: tokens are further apart than their heads
    before, expected = rows.clone(), rows.clone()
    rotated = operators.rotate(packed[:, :heads], (cos, sin))
    assert rotated.data_ptr() == rows.data_ptr()
    expected[:, :heads] = TorchOperators().rotate(expected[:, :heads], (cos, sin))
    _assert_close(rows, expected)
    assert torch.equal(rows[:, heads:], before[:, heads:])


@_dtypes
@pytest.mark.parametrize("shape", _SHAPES)
def test_silu_and_mul_equals_torch(
    operators: CpuOperators, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    gate_up = _randn(dtype, shape[0], 2 * shape[1]) * 4
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -88.0, 0.0])
    _assert_close(operators.silu_and_mul(gate_up), TorchOperators().silu_and_mul(gate_up))


def test_what_is_not_finite_stays_so(operators: CpuOperators) -> None:
    gate_up = torch.ones(2, 16)
    gate_up[1, 3] = torch.nan
    assert operators.silu_and_mul(gate_up).isnan().nonzero().tolist() == [[1, 3]]
    _, normed = operators.add_rms_norm(gate_up, torch.ones(2, 16), _norm(torch.float32, 16))
    assert normed.isnan().all(dim=1).tolist() == [False, True]


def test_refuses_what_it_has_no_code_for(operators: CpuOperators) -> None:
    x, norm = torch.ones(4, 16), _norm(torch.float32, 16)
    table = torch.ones(4, 1, 8)
    for call in (
        lambda: operators.silu_and_mul(torch.ones(4, 8)),
        lambda: operators.silu_and_mul(x.double()),
        lambda: operators.silu_and_mul(x.T),
        lambda: operators.add_rms_norm(x, x.half(), norm),
        lambda: operators.add_rms_norm(x, x[:2].clone(), norm),
        lambda: operators.add_rms_norm(x, x.clone(), _norm(torch.float32, 8)),
        lambda: operators.rms_norm(x.T, norm),
        lambda: operators.rotate(x.view(4, 2, 8), (table[:3], table[:3])),
        lambda: operators.rotate(x.view(4, 2, 8).transpose(0, 1), (table, table)),
        lambda: operators.rotate(x.view(4, 2, 8), (table.half(), table.half())),
    ):
        with pytest.raises(ValueError, match=r"no compiled operator|must be contiguous"):
            call()


def _randn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def _norm(dtype: torch.dtype, size: int) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, dtype=dtype, device="cpu").requires_grad_(False)
    norm.weight.copy_(_randn(dtype, size))
    return norm


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = _TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
