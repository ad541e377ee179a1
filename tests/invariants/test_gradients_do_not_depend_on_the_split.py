"""How the rows of an optimiser step are split into micro-batches and chunks changes no gradient."""

from typing import Any

import pytest
import torch

from tessera_cli.distill.data.corpus import build_batch
from tests.training_factories import make_decoder, make_documents, make_trainer

DOCUMENTS = make_documents([3, 14, 6, 9, 2, 11, 5, 17])


def _step(split: list[int], **keys: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and unclipped gradients of the documents, split into micro-batches of `split` documents."""
    assert sum(split) == len(DOCUMENTS)
    rest = iter(DOCUMENTS)
    batches = [build_batch([next(rest) for _ in range(size)]) for size in split]
    student = make_decoder(2)
    trainer = make_trainer(student, make_decoder(1, num_hidden_layers=3), max_grad_norm=1e9, **keys)
    figures = trainer.train_step(batches)
    assert figures is not None
    return figures.loss, {name: p.grad for name, p in student.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
@pytest.mark.parametrize("split", [[4, 4], [2, 2, 2, 2], [1] * 8, [5, 1, 2]])
@pytest.mark.parametrize("loss_chunk_tokens", [1, 7, 256])
def test_gradients_do_not_depend_on_the_split(kind: str, split: list[int], loss_chunk_tokens: int) -> None:
    loss = {"kind": kind, "ce_weight": 0.5, "temperature": 2.0}
    expected_loss, expected = _step([8], loss=loss)
    found_loss, found = _step(split, loss=loss, loss_chunk_tokens=loss_chunk_tokens)
    assert found_loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6 * gradient.abs().max().item())
