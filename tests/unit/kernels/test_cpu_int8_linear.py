"""The compiled int8 linear layer against the product in plain torch."""

import pytest
import torch

from tessera_cli.int8_weight import Int8Weight
from tessera_cli.kernels.cpu_library import CpuLibrary
from tessera_cli.kernels.int8_linear import Int8Linear, plain_int8_linear


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 64, 100, 257])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(16, 2), (48, 576), (17, 33), (1, 7), (100, 1536), (70, 1025)]
)
def test_equals_the_product_with_the_same_weights(
    build: CpuLibrary, tokens: int, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(tokens + inputs)
    weight = Int8Weight.quantise(torch.randn(outputs, inputs, generator=generator))
    # Tokens of very different size: each has a scale of its own.
    x = torch.randn(tokens, inputs, generator=generator) * 10.0 ** torch.arange(tokens).remainder(7)[:, None]
    out, expected = Int8Linear(build, weight)(x), plain_int8_linear(x, weight)
    norms = x.norm(dim=1, keepdim=True) * (weight.values * weight.scales[:, None]).norm(dim=1)
    assert bool(((out - expected).abs() <= 3e-4 * norms).all())


def test_the_largest_sums_do_not_overflow(build: CpuLibrary) -> None:
    for inputs in (64, 1000, 8192, 40_000):
        weight = Int8Weight.quantise(torch.ones(16, inputs))
        out = Int8Linear(build, weight)(torch.full((2, inputs), -3.0))
        torch.testing.assert_close(out, torch.full((2, 16), -3.0 * inputs), rtol=1e-3, atol=0)


def test_wide_weights_leave_activations_thirteen_bits(build: CpuLibrary) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = Int8Weight.quantise(torch.randn(64, 8192, generator=generator))
    x = torch.randn(4, 8192, generator=generator)
    error = Int8Linear(build, weight)(x) - plain_int8_linear(x, weight)
    # A step is the largest of a row over 2^13; errors of half a step at most add up as their squares do.
    steps = x.abs().amax(dim=1, keepdim=True) / 2**13
    assert bool((error.norm() <= (steps / 12**0.5).norm() * weight.dequantise().norm()).all())


def test_neither_batch_nor_threads_change_a_bit(build: CpuLibrary, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    linear = Int8Linear(build, Int8Weight.quantise(torch.randn(70, 1025, generator=generator)))
    x = torch.randn(100, 1025, generator=generator)
    torch.set_num_threads(1)
    alone = torch.cat([linear(row) for row in x.split(1)])
    torch.set_num_threads(threads)
    assert torch.equal(linear(x), alone)
    assert torch.equal(linear(x[37:60]), alone[37:60])


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 36), (96, 576), (33, 40), (64, 33)])
def test_a_weight_packed_in_place_gives_the_same_bits(
    build: CpuLibrary, outputs: int, inputs: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    weight = Int8Weight.quantise(torch.randn(outputs, inputs, generator=generator))
    x, index = torch.randn(5, inputs, generator=generator), torch.arange(outputs)
    plain, memory = Int8Linear(build, weight), Int8Weight(weight.values.clone(), weight.scales)
    in_place = Int8Linear(build, memory, in_place=True)
    takes_the_memory = outputs % build.functions.tessera_panel_columns() == 0 and inputs % 4 == 0
    assert (not torch.equal(memory.values, weight.values)) == takes_the_memory
    assert torch.equal(in_place.rows(index), weight.dequantise())
    assert torch.equal(in_place(x), plain(x))


def test_no_tokens_give_no_rows(build: CpuLibrary) -> None:
    linear = Int8Linear(build, Int8Weight.quantise(torch.ones(9, 40)))
    assert linear(torch.empty(0, 40)).shape == (0, 9)


def test_zeros_give_zeros_and_rows_that_are_not_finite_give_nan(build: CpuLibrary) -> None:
    weight = Int8Weight.quantise(torch.cat([torch.zeros(1, 20), torch.ones(4, 20)]))
    x = torch.ones(4, 20)
    x[1], x[2, 7], x[3, 19] = 0, torch.nan, torch.inf
    out = Int8Linear(build, weight)(x)
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
def test_rows_are_those_of_the_weight_to_the_bit(build: CpuLibrary, outputs: int, inputs: int) -> None:
    weight = Int8Weight.quantise(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)))
    index = torch.tensor([0, outputs - 1, outputs // 2, 0])
    assert torch.equal(Int8Linear(build, weight).rows(index), weight.dequantise()[index])


def test_refuses_other_shapes_and_dtypes(build: CpuLibrary) -> None:
    linear = Int8Linear(build, Int8Weight.quantise(torch.ones(4, 8)))
    for x in (torch.ones(2, 9), torch.ones(2, 8, dtype=torch.float16), torch.ones(8, 2).T):
        with pytest.raises(ValueError, match="expected contiguous float32"):
            linear(x)
