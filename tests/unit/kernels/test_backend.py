"""The choice of an attention backend."""

import pytest
import torch

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.kernels.backend import build_attention, select_backend
from tessera_cli.kernels.reference import ReferenceAttention


@pytest.mark.parametrize("name", ["auto", "reference"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_names_the_backend_and_the_reason(name: str, device: str) -> None:
    chosen, reason = select_backend(name, device)
    assert name in ("auto", chosen)
    assert reason


def test_refuses_an_unknown_backend() -> None:
    with pytest.raises(UsageError, match="flash"):
        select_backend("flash", "cpu")


def test_builds_what_was_selected() -> None:
    attention = build_attention(
        "reference",
        [AttentionLayer(2, 1, 8, 1.0, None, None)],
        num_blocks=3,
        block_size=4,
        dtype=torch.float32,
        kv_cache_dtype=torch.int8,
        device="cpu",
    )
    assert isinstance(attention, ReferenceAttention)
    assert attention.key_caches[0].elements.dtype == torch.int8
