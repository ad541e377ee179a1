"""The choice of an attention backend."""

from dataclasses import replace

import pytest
import torch

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.kernels import backend
from tessera_cli.kernels.backend import build_attention, select_backend
from tessera_cli.kernels.reference import ReferenceAttention

_LAYER = AttentionLayer(2, 1, 64, 0.125, None, None)


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose CPU kernel loads, whatever this one has."""
    monkeypatch.setitem(backend._OBSTACLES, "cpu", lambda device: None)


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a compiled CPU kernel."""
    monkeypatch.setitem(backend._OBSTACLES, "cpu", lambda device: "no compiler, install one")


@pytest.mark.usefixtures("with_kernel")
def test_auto_is_the_kernel_where_it_runs() -> None:
    assert select_backend("auto", "cpu")[0] == "cpu"
    assert select_backend("auto", "cpu", layers=[_LAYER], block_size=16)[0] == "cpu"
    assert select_backend("cpu", "cpu") == ("cpu", "asked for")
    assert select_backend("reference", "cpu") == ("reference", "asked for")


@pytest.mark.usefixtures("without_kernel")
def test_without_a_kernel_auto_is_the_reference_and_the_reason_says_why() -> None:
    name, reason = select_backend("auto", "cpu")
    assert name == "reference"
    assert "no compiler, install one" in reason
    with pytest.raises(UsageError, match="no compiler, install one"):
        select_backend("cpu", "cpu")


@pytest.mark.usefixtures("with_kernel")
@pytest.mark.parametrize(
    ("layer", "block_size", "match"),
    [
        (_LAYER, 4, "not 4"),
        (replace(_LAYER, head_dim=12), 16, "12"),
        (replace(_LAYER, head_dim=264), 16, "264"),
    ],
)
def test_sizes_without_a_kernel_are_the_references(
    layer: AttentionLayer, block_size: int, match: str
) -> None:
    name, reason = select_backend("auto", "cpu", layers=[layer], block_size=block_size)
    assert name == "reference"
    assert match in reason
    with pytest.raises(UsageError, match=match):
        select_backend("cpu", "cpu", layers=[layer], block_size=block_size)


@pytest.mark.usefixtures("with_kernel")
def test_numbers_without_a_kernel_are_the_references() -> None:
    assert select_backend("auto", "cpu", dtype=torch.float32)[0] == "cpu"
    assert select_backend("auto", "cpu", dtype=torch.float64) == (
        "reference",
        "plain PyTorch: the compiled kernels have no float64",
    )
    with pytest.raises(UsageError, match="float64"):
        select_backend("cpu", "cpu", dtype=torch.float64)


@pytest.mark.parametrize(("name", "device"), [("cuda", "cpu"), ("cpu", "cuda"), ("cpu", "cuda:1")])
def test_a_kernel_of_another_device_is_refused(name: str, device: str) -> None:
    with pytest.raises(UsageError, match=f"{name!r} does not run on {device}"):
        select_backend(name, device)


def test_this_machine_has_a_backend() -> None:
    name, reason = select_backend("auto", "cpu")
    assert name in ("cpu", "reference")
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
