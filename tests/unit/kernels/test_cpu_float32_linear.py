"""The compiled float32 linear layer against the product in float64."""

import pytest
import torch
from torch import Tensor

from tessera_cli.kernels.cpu_library import CpuLibrary
from tessera_cli.kernels.float32_linear import Float32Linear

_SHAPES = [(16, 2), (48, 576), (17, 33), (1, 1), (70, 1025), (5, 3000)]
_TOKENS = [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 64, 257]


@pytest.mark.parametrize("tokens", _TOKENS)
@pytest.mark.parametrize(("outputs", "inputs"), _SHAPES)
def test_equals_the_product(build: CpuLibrary, outputs: int, inputs: int, tokens: int) -> None:
    weight, x = _random(outputs, inputs, seed=tokens), _random(tokens, inputs, seed=outputs)
    expected = x.double() @ weight.double().T
    error = (Float32Linear(build, weight)(x) - expected).abs()
    assert bool((error <= 1e-6 * x.norm(dim=1, keepdim=True) * weight.norm(dim=1)).all())


@pytest.mark.parametrize(("outputs", "inputs"), [(70, 1025), (33, 576)])
def test_neither_batch_nor_threads_change_a_bit(
    build: CpuLibrary, outputs: int, inputs: int, threads: int
) -> None:
    linear, x = Float32Linear(build, _random(outputs, inputs)), _random(100, inputs)
    torch.set_num_threads(1)
    alone = torch.cat([linear(row) for row in x.split(1)])
    torch.set_num_threads(threads)
    assert torch.equal(linear(x), alone)
    assert torch.equal(linear(x[37:60]), alone[37:60])


def test_elements_that_are_not_finite_stay_in_their_row(build: CpuLibrary) -> None:
    linear, x = Float32Linear(build, _random(21, 40)), _random(30, 40)
    clean = linear(x)
    x[3, 7], x[20, 39] = torch.nan, -torch.inf
    out = linear(x)
    assert not bool(out[[3, 20]].isfinite().any())
    others = [row for row in range(30) if row not in (3, 20)]
    assert torch.equal(out[others], clean[others])


def test_no_tokens_give_no_rows(build: CpuLibrary) -> None:
    assert Float32Linear(build, _random(9, 40))(torch.empty(0, 40)).shape == (0, 9)


@pytest.mark.parametrize(("outputs", "inputs"), _SHAPES)
def test_rows_are_those_of_the_weight_to_the_bit(build: CpuLibrary, outputs: int, inputs: int) -> None:
    weight = _random(outputs, inputs)
    index = torch.tensor([0, outputs - 1, outputs // 2, 0])
    assert torch.equal(Float32Linear(build, weight).rows(index), weight[index])


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 33), (96, 576), (33, 40)])
def test_a_weight_packed_in_place_gives_the_same_bits(
    build: CpuLibrary, outputs: int, inputs: int, threads: int
) -> None:
    torch.set_num_threads(threads)
    weight, x, index = _random(outputs, inputs), _random(5, inputs), torch.arange(outputs)
    plain, memory = Float32Linear(build, weight), weight.clone()
    in_place = Float32Linear(build, memory, in_place=True)
    takes_the_memory = outputs % build.functions.tessera_panel_columns() == 0
    assert (not torch.equal(memory, weight)) == takes_the_memory
    assert torch.equal(in_place.rows(index), weight)
    assert torch.equal(in_place(x), plain(x))


def test_a_view_packed_in_place_overwrites_nothing(build: CpuLibrary) -> None:
    memory = _random(40, 64)
    kept = memory.clone()
    linear = Float32Linear(build, memory.T, in_place=True)
    assert torch.equal(linear.rows(torch.arange(64)), kept.T)
    assert torch.equal(memory, kept)


def test_a_weight_that_is_a_view_is_packed_as_it_reads(build: CpuLibrary) -> None:
    weight, x = _random(20, 30), _random(3, 20)
    assert torch.equal(Float32Linear(build, weight.T)(x), Float32Linear(build, weight.T.contiguous())(x))


def test_refuses_other_shapes_and_dtypes(build: CpuLibrary) -> None:
    linear = Float32Linear(build, torch.ones(4, 8))
    for x in (torch.ones(2, 9), torch.ones(2, 8, dtype=torch.float16), torch.ones(8, 2).T, torch.ones(8)):
        with pytest.raises(ValueError, match="expected contiguous float32"):
            linear(x)
    for weight in (torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8)):
        with pytest.raises(ValueError, match="expected float32"):
            Float32Linear(build, weight)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
