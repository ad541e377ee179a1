"""The compiled int8 linear layer against the product in plain torch."""

import pytest
import torch

from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
from tessera_cli.kernels.int8_linear import Int8Linear, Int8Weight, plain_int8_linear

_LIBRARY = load_library()
pytestmark = pytest.mark.skipif(not isinstance(_LIBRARY, CpuLibrary), reason=str(_LIBRARY))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 64, 100, 257])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 2), (48, 576), (17, 33), (1, 7), (100, 1536)])
def test_equals_the_product_with_the_same_weights(tokens: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(tokens + inputs)
    weight = Int8Weight.quantise(torch.randn(outputs, inputs, generator=generator))
    # Tokens of very different size: each has a scale of its own.
    x = torch.randn(tokens, inputs, generator=generator) * 10.0 ** torch.arange(tokens).remainder(7)[:, None]
    out, expected = _linear(weight)(x), plain_int8_linear(x, weight)
    norms = x.norm(dim=1, keepdim=True) * (weight.values * weight.scales[:, None]).norm(dim=1)
    assert bool(((out - expected).abs() <= 3e-4 * norms).all())


def test_the_largest_sums_do_not_overflow() -> None:
    for inputs in (64, 1000, 8192):
        weight = Int8Weight.quantise(torch.ones(16, inputs))
        out = _linear(weight)(torch.full((2, inputs), -3.0))
        torch.testing.assert_close(out, torch.full((2, 16), -3.0 * inputs), rtol=1e-3, atol=0)


def test_zeros_give_zeros_and_rows_that_are_not_finite_give_nan() -> None:
    weight = Int8Weight.quantise(torch.cat([torch.zeros(1, 20), torch.ones(4, 20)]))
    x = torch.ones(4, 20)
    x[1], x[2, 7], x[3, 19] = 0, torch.nan, torch.inf
    out = _linear(weight)(x)
    assert out[0].tolist() == pytest.approx([0, 20, 20, 20, 20], rel=1e-4)
    assert out[1].tolist() == [0] * 5
    assert bool(out[2:].isnan().all())


def test_a_weight_is_within_half_a_step_of_its_int8_form() -> None:
    weight = torch.randn(9, 40, generator=torch.Generator().manual_seed(0))
    quantised = Int8Weight.quantise(weight)
    error = (quantised.values * quantised.scales[:, None] - weight).abs()
    assert bool((error <= quantised.scales[:, None] * 0.5001).all())
    with pytest.raises(ValueError, match="not finite"):
        Int8Weight.quantise(torch.tensor([[1.0, torch.inf]]))


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 2), (48, 576), (17, 33), (1, 7)])
def test_rows_are_those_of_the_weight_to_the_bit(outputs: int, inputs: int) -> None:
    weight = Int8Weight.quantise(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)))
    index = torch.tensor([0, outputs - 1, outputs // 2, 0])
    assert torch.equal(_linear(weight).rows(index), weight.dequantise()[index])


def test_refuses_other_shapes_and_dtypes() -> None:
    linear = _linear(Int8Weight.quantise(torch.ones(4, 8)))
    for x in (torch.ones(2, 9), torch.ones(2, 8, dtype=torch.float16), torch.ones(8, 2).T):
        with pytest.raises(ValueError, match="expected contiguous float32"):
            linear(x)


def _linear(weight: Int8Weight) -> Int8Linear:
    assert isinstance(_LIBRARY, CpuLibrary)
    return Int8Linear(_LIBRARY, weight)
