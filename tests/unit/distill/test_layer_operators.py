"""A decoder with the operators of training, beside one in plain torch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tessera_cli.distill.data.corpus import build_batch
from tessera_cli.distill.students.layer_operators import TrainingOperators, training_operators
from tessera_cli.distill.students.student import forward_batch
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.operators import Operators, TorchOperators
from tests.training_factories import make_decoder, make_documents

_BATCH = build_batch(make_documents([9, 4, 16]))
pytestmark = pytest.mark.skipif(
    not isinstance(training_operators(), TrainingOperators), reason="no compiled library"
)


def test_a_decoder_and_its_gradients_are_those_of_plain_torch_in_float64() -> None:
    decoder = _decoder()
    ours = _run(decoder, training_operators())
    theirs = _run(decoder.double(), TorchOperators())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5 * other.abs().max().item())


def test_compiled_code_is_used_where_it_fits() -> None:
    names = {type(node).__name__ for node in _nodes(forward_batch(_decoder(), _BATCH))}
    assert {"_RmsNormBackward", "_AddRmsNormBackward", "_RotateBackward", "_SiluAndMulBackward"} <= names


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_types_are_plain_torch_to_the_bit(dtype: torch.dtype) -> None:
    decoder = _decoder().to(dtype)
    for one, other in zip(_run(decoder, training_operators()), _run(decoder, TorchOperators()), strict=True):
        assert torch.equal(one, other)


def test_widths_that_do_not_fit_are_plain_torch() -> None:
    operators, plain = training_operators(), TorchOperators()
    gate_up, qk = torch.randn(3, 24), torch.randn(3, 2, 8)
    table = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    assert torch.equal(operators.silu_and_mul(gate_up), plain.silu_and_mul(gate_up))
    assert torch.equal(operators.rotate(qk, table), plain.rotate(qk, table))


def test_autocast_is_followed() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = (_run(_decoder(), each) for each in (training_operators(), TorchOperators()))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.05 * other.abs().max().item())


def _decoder() -> Decoder:
    small = make_decoder(0)
    decoder = Decoder(replace(small.config, hidden_size=64, head_dim=16))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.2 * noise)
    return decoder


def _run(decoder: Decoder, operators: Operators) -> list[Tensor]:
    """Hidden states, and the gradient of a function of them in every parameter."""
    hidden = forward_batch(decoder, _BATCH, operators)
    grads = torch.autograd.grad(hidden.sin().sum(), list(decoder.parameters()), materialize_grads=True)
    return [hidden.detach(), *grads]


def _nodes(result: Tensor) -> set[object]:
    found, todo = set(), [result.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            todo += [following for following, _ in node.next_functions]
    return found
