"""The compiled top-k and top-p against the plain ones."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera_cli.engine.truncation import truncate_rows_plainly
from tessera_cli.kernels.cpu_library import CpuLibrary
from tessera_cli.kernels.cpu_truncation import truncate_rows

_SHARES = st.sampled_from([5e-324, 1e-9, 0.25, 0.5, 0.75, 1 - 2**-53, 1.0]) | st.floats(1e-6, 1.0)
# The library of a parametrised fixture is the same for all examples.
_for_each_build = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@st.composite
def _batches(draw: st.DrawFn) -> tuple[Tensor, list[int], Tensor, Tensor]:
    """Weights, rows, top-k and top-p. Weights are multiples of 1/16: ties abound and sums are exact."""
    num_rows, size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 7, 40, 1025, 3000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    sixteenths = torch.randint(0, draw(st.integers(1, 17)), (num_rows, size), generator=generator)
    weights = sixteenths.float() / 16
    weights[:, draw(st.integers(0, size - 1))] = 1.0
    rows = draw(st.lists(st.integers(0, num_rows - 1), min_size=1, unique=True).map(sorted))
    top_k = [draw(st.sampled_from([1, size]) | st.integers(1, size)) for _ in rows]
    top_p = [draw(_SHARES) for _ in rows]
    return weights, rows, torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64)


@_for_each_build
@given(batch=_batches())
def test_keeps_what_the_plain_version_keeps_ties_included(build: CpuLibrary, batch: tuple) -> None:
    weights, rows, top_k, top_p = batch
    compiled, plain = weights.clone(), weights.clone()
    truncate_rows(build, compiled, torch.tensor(rows), top_k, top_p)
    truncate_rows_plainly(plain, rows, top_k, top_p)
    assert torch.equal(compiled, plain)


@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("top_k", [1, 50, 1500, 49152])
def test_keeps_what_the_plain_version_keeps_of_a_vocabulary(
    build: CpuLibrary, top_k: int, spread: float
) -> None:
    logits = torch.randn(6, 49152, generator=torch.Generator().manual_seed(top_k)) * spread
    weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    rows, ks = list(range(6)), torch.full((6,), top_k)
    top_p = torch.tensor([1e-6, 0.3, 0.9, 0.95, 0.999, 1.0], dtype=torch.float64)
    plain = weights.clone()
    truncate_rows(build, weights, torch.tensor(rows), ks, top_p)
    truncate_rows_plainly(plain, rows, ks, top_p)
    assert torch.equal(weights, plain)


def test_neither_threads_nor_neighbours_change_a_bit(build: CpuLibrary, threads: int) -> None:
    weights = torch.rand(5, 4099, generator=torch.Generator().manual_seed(0))
    top_k, top_p = torch.full((5,), 3000), torch.full((5,), 0.7, dtype=torch.float64)
    alone, together = weights.clone(), weights.clone()
    for row in range(5):
        truncate_rows(build, alone, torch.tensor([row]), top_k[:1], top_p[:1])
    torch.set_num_threads(threads)
    truncate_rows(build, together, torch.arange(5), top_k, top_p)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_a_row_that_is_not_finite_leaves_the_others_alone(build: CpuLibrary, bad: float) -> None:
    weights = torch.tensor([[1.0, 0.5, 0.25], [bad, 1.0, bad], [0.25, 1.0, 0.5]])
    top_p = torch.full((3,), 0.8, dtype=torch.float64)
    truncate_rows(build, weights, torch.arange(3), torch.full((3,), 3), top_p)
    assert weights[[0, 2]].tolist() == [[1.0, 0.5, 0.0], [0.0, 1.0, 0.5]]


def test_refuses_what_it_has_no_code_for(build: CpuLibrary) -> None:
    weights, rows = torch.ones(2, 4), torch.arange(2)
    top_p = torch.ones(2, dtype=torch.float64)
    for wrong in (
        (weights.double(), rows, rows + 1, top_p),
        (weights.T, rows, rows + 1, top_p),
        (weights, rows, rows[:1], top_p),
        (weights, rows, rows + 1, top_p.float()),
    ):
        with pytest.raises(ValueError, match="must be contiguous"):
            truncate_rows(build, *wrong)
