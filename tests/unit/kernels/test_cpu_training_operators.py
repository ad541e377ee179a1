"""The compiled elementwise operators with gradients, against plain torch in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tessera_cli.kernels.cpu_library import CpuLibrary
from tessera_cli.kernels.training_operators import CpuTrainingOperators
from tessera_cli.models.layers import RMSNorm
from tessera_cli.models.operators import TorchOperators

Step = Callable[..., Tensor | tuple[Tensor, Tensor]]
_SHAPES = [(1, 8), (3, 24), (33, 576), (100, 1536)]


@pytest.fixture
def operators(build: CpuLibrary) -> CpuTrainingOperators:
    return CpuTrainingOperators(build)


@pytest.mark.parametrize("shape", _SHAPES)
def test_rms_norm_and_its_gradients(operators: CpuTrainingOperators, shape: tuple[int, int]) -> None:
    x, weight = torch.randn(shape) * 5, torch.rand(shape[1]) + 0.5
    _compare(
        lambda x, weight: operators.rms_norm(x, _norm(weight)),
        lambda x, weight: TorchOperators().rms_norm(x, _norm(weight)),
        x,
        weight,
    )


@pytest.mark.parametrize("shape", _SHAPES)
def test_add_rms_norm_and_its_gradients(operators: CpuTrainingOperators, shape: tuple[int, int]) -> None:
    x, update, weight = torch.randn(shape), torch.randn(shape) * 3, torch.rand(shape[1]) + 0.5
    _compare(
        lambda x, update, weight: operators.add_rms_norm(x, update, _norm(weight)),
        lambda x, update, weight: TorchOperators().add_rms_norm(x, update.clone(), _norm(weight)),
        x,
        update,
        weight,
    )


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 4, 16), (5, 12, 64), (70, 3, 32)])
def test_rotate_and_its_gradient(
    operators: CpuTrainingOperators, tokens: int, heads: int, head_dim: int
) -> None:
    table = _table(tokens, head_dim)
    packed = torch.randn(tokens, heads + 2, head_dim)
    _compare(
        lambda packed: operators.rotate(packed[:, :heads], table),
        lambda packed: TorchOperators().rotate(packed[:, :heads], tuple(part.double() for part in table)),
        packed,
    )


@pytest.mark.parametrize("shape", _SHAPES)
def test_silu_and_mul_and_its_gradient(operators: CpuTrainingOperators, shape: tuple[int, int]) -> None:
    gate_up = torch.randn(shape[0], 2 * shape[1]) * 4
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, -88.0, 0.0])
    _compare(operators.silu_and_mul, TorchOperators().silu_and_mul, gate_up)


def test_arguments_are_left_as_they_are(operators: CpuTrainingOperators) -> None:
    arguments = _arguments()
    before = [argument.detach().clone() for argument in arguments]
    _all_steps(operators, *arguments)
    assert all(torch.equal(one, other) for one, other in zip(arguments, before, strict=True))


def test_any_number_of_threads_gives_the_same_bits(operators: CpuTrainingOperators, threads: int) -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    expected = _all_steps(operators, *arguments)
    torch.set_num_threads(threads)
    assert all(
        torch.equal(one, other)
        for one, other in zip(_all_steps(operators, *arguments), expected, strict=True)
    )


def test_a_tokens_bits_do_not_depend_on_those_beside_it(operators: CpuTrainingOperators) -> None:
    x, update, weight = _arguments()
    _, _, *whole = _all_steps(operators, x, update, weight)
    of_parts = [
        _all_steps(operators, *(part.detach().requires_grad_() for part in parts), weight)[2:]
        for parts in zip(x.split([50, 20, 31]), update.split([50, 20, 31]), strict=True)
    ]
    for one, parts in zip(whole, zip(*of_parts, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), one)


def test_a_frozen_weight_gets_no_gradient(operators: CpuTrainingOperators) -> None:
    x, weight = torch.randn(5, 16, requires_grad=True), torch.ones(16)
    operators.rms_norm(x, _norm(weight)).square().sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_what_is_not_finite_stays_so(operators: CpuTrainingOperators) -> None:
    x, update, weight = _arguments()
    with torch.no_grad():
        x[3, 5] = torch.nan
    _, _, x_grad, _, normed, gated = _all_steps(operators, x, update, weight)
    for rows in (x_grad, normed, gated):
        assert rows[3].isnan().any()
        assert rows[:3].isfinite().all()
        assert rows[4:].isfinite().all()


def _compare(compiled: Step, plain: Step, *arguments: Tensor) -> None:
    """Results and gradients of `compiled` in float32, beside those of `plain` in float64."""
    ours = [argument.clone().requires_grad_() for argument in arguments]
    theirs = [argument.double().requires_grad_() for argument in arguments]
    results, expected = compiled(*ours), plain(*theirs)
    results = (results,) if isinstance(results, Tensor) else results
    expected = (expected,) if isinstance(expected, Tensor) else expected
    slopes = [torch.randn(result.shape) for result in results]
    grads = torch.autograd.grad(results, ours, slopes)
    expected_grads = torch.autograd.grad(expected, theirs, [slope.double() for slope in slopes])
    for one, other in zip((*results, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=3e-6, atol=3e-6 * other.abs().max().item())


def _arguments() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, update = torch.randn(2, 101, 576, generator=generator)
    weight = torch.rand(576, generator=generator)
    return x.requires_grad_(), update.clone().requires_grad_(), weight.requires_grad_()


def _all_steps(operators: CpuTrainingOperators, x: Tensor, update: Tensor, weight: Tensor) -> list[Tensor]:
    """Every step after the other: the loss's gradient in the weight, itself, those in the rest, results."""
    total, normed = operators.add_rms_norm(x, update, _norm(weight))
    heads = operators.rotate(operators.rms_norm(normed, _norm(weight)).view(-1, 9, 64), _table(len(x), 64))
    gated = operators.silu_and_mul(heads.flatten(1))
    loss = (gated.square().sum(1) + total.sin().sum(1)).sum()
    x_grad, update_grad, weight_grad = torch.autograd.grad(loss, (x, update, weight))
    return [weight_grad, loss.detach(), x_grad, update_grad, normed.detach(), gated.detach()]


def _table(tokens: int, head_dim: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(head_dim // 2).cos().expand(tokens, 1, -1)
    return torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)


def _norm(weight: Tensor) -> RMSNorm:
    """A norm whose weight is this very tensor, with its gradient."""
    norm = RMSNorm(len(weight), 1e-5, dtype=weight.dtype, device="cpu")
    del norm.weight
    norm.weight = weight  # type: ignore[assignment]
    return norm
