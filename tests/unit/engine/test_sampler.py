"""Sampling: the right distribution, row by row, whatever the neighbours are."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tessera_cli.engine.sampler import sample, uniform
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import SampleError

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=5.0, top_p=0.99),
    SamplingParams(temperature=1.5, top_k=40, top_p=0.5),
    SamplingParams(temperature=1.5, top_k=4, top_p=0.7),
    SamplingParams(temperature=1.0, top_k=1500),
]


def draw(logits: Tensor, params: SamplingParams, count: int) -> Tensor:
    """How often each token comes up in `count` draws from one row, the uniforms spread evenly."""
    uniforms = [(index + 1) / count for index in range(count)]
    tokens = sample(logits.expand(count, -1), [params] * count, uniforms)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def allowed(logits: Tensor, params: SamplingParams) -> Tensor:
    """The definition in float64: temperature, top-k, top-p, renormalised."""
    p = (logits.double() / params.temperature).softmax(-1)
    order = p.argsort(descending=True, stable=True)
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    before = 0.0
    for token in order.tolist():
        if before >= params.top_p:
            p[token] = 0
        else:
            before += float(p[token])
    return p / p.sum()


@pytest.mark.parametrize("params", PARAMS[1:], ids=str)
def test_draws_follow_the_definition(params: SamplingParams) -> None:
    logits = 2 * torch.randn(50, generator=torch.Generator().manual_seed(1))
    counts = draw(logits, params, 1000)
    expected = allowed(logits, params)
    assert torch.equal(counts > 0, counts.bool() & (expected > 0))
    torch.testing.assert_close(counts.double() / 1000, expected, atol=2 / 1000, rtol=0)


def test_the_nucleus_may_end_far_down_the_vocabulary() -> None:
    logits = 0.01 * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, top_p=0.9)
    expected = allowed(logits, params) > 0
    counts = draw(logits, params, 300)
    assert int((counts.bool() & ~expected).sum()) <= 1  # where float32 and float64 put the edge
    rank = logits.argsort(descending=True).argsort()
    assert int(rank[counts.bool()].max()) > 4000


@pytest.mark.parametrize("vocab_size", [1, 50, 2000])
def test_a_batch_equals_its_rows_alone(vocab_size: int) -> None:
    logits = 3 * torch.randn(len(PARAMS), vocab_size, generator=torch.Generator().manual_seed(2))
    for position in range(8):
        uniforms = [uniform(row, 0, position) for row in range(len(PARAMS))]
        together = sample(logits, PARAMS, uniforms)
        alone = [
            sample(logits[row : row + 1], [PARAMS[row]], [uniforms[row]])[0] for row in range(len(PARAMS))
        ]
        assert together == alone


def test_greedy_and_top_1_take_the_most_likely_token() -> None:
    logits = torch.randn(30, 100, generator=torch.Generator().manual_seed(3))
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=3.0, top_k=1),
        SamplingParams(temperature=3.0, top_p=1e-9),
        SamplingParams(temperature=3.0, top_p=5e-324),  # zero in float32
    ):
        assert sample(logits, [params] * 30, [1.0] * 30) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: SamplingParams) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    clean = sample(logits, [params] * 3, [0.3, 0.6, 0.9])
    logits[1, 7] = bad
    tokens = sample(logits, [params] * 3, [0.3, 0.6, 0.9])
    assert isinstance(tokens[1], SampleError)
    assert [tokens[0], tokens[2]] == [clean[0], clean[2]]


@pytest.mark.parametrize("edge", [2**-24, 1.0])
def test_the_ends_of_the_unit_interval_pick_tokens_with_probability(edge: float) -> None:
    logits = torch.full((1, 300), -200.0)
    logits[0, [100, 200]] = 0.0
    expected = 100 if edge < 0.5 else 200
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=2)):
        assert sample(logits, [params], [edge]) == [expected]


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0]])
    for temperature in (1e-4, 1.0, 1e30):
        (token,) = sample(logits, [SamplingParams(temperature=temperature)], [0.2])
        assert token == 0


def test_a_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(5))
    expected = sample(logits, [SamplingParams(top_p=0.9)], [0.4])
    for top_k in (60, 61, 2**63, 2**70):
        assert sample(logits, [SamplingParams(top_p=0.9, top_k=top_k)], [0.4]) == expected


def test_sampling_leaves_the_logits_alone() -> None:
    logits = torch.randn(len(PARAMS), 60)
    copy = logits.clone()
    sample(logits, PARAMS, [0.5] * len(PARAMS))
    assert torch.equal(logits, copy)


@pytest.mark.parametrize(("digest", "expected"), [(b"\x00" * 8, 2**-24), (b"\xff" * 8, 1.0)])
def test_uniforms_exclude_zero_and_reach_one(
    monkeypatch: pytest.MonkeyPatch, digest: bytes, expected: float
) -> None:
    fake = SimpleNamespace(digest=lambda: digest)
    monkeypatch.setattr("tessera_cli.engine.sampler.hashlib.blake2b", lambda key, digest_size: fake)
    assert uniform(0, 0, 0) == expected


def test_uniforms_fill_the_interval_and_depend_on_every_argument() -> None:
    values = torch.tensor(
        [
            uniform(seed, child, position)
            for seed in range(20)
            for child in range(2)
            for position in range(100)
        ]
    )
    assert len(values.unique()) > 3990
    assert bool(((values > 0) & (values <= 1)).all())
    counts = torch.histc(values, bins=10, min=0, max=1)
    assert bool((counts - 400).abs().max() < 100)
    assert uniform(5, 0, 9) == uniform(5, 0, 9)
    assert uniform(1, 0, 11) != uniform(11, 0, 1)
