"""Sampling: the right distribution, row by row, whatever the neighbours are."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tessera_cli.engine.sampler import SampleRow, sample, uniform
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
    SamplingParams(temperature=1.0, top_k=1500, top_p=0.6),
    SamplingParams(temperature=1.5, min_p=0.2),
    SamplingParams(temperature=2.0, min_p=0.1, top_k=9, top_p=0.7),
]
# What needs more than the logits: the tokens so far, or the model's ends.
ADJUSTED = [
    SamplingParams(temperature=0.0, logit_bias={3: 5.0, 8: -100.0}),
    SamplingParams(temperature=0.9, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, presence_penalty=2.0, frequency_penalty=-2.0),
    SamplingParams(temperature=1.0, min_tokens=9, stop_token_ids=(4,)),
    SamplingParams(temperature=0.7, top_p=0.9, min_p=0.01, frequency_penalty=0.5, logit_bias={0: 3.0}),
]


def name_of(params: object) -> str:
    """What differs from the default, as a short test id."""
    values = vars(params).items() if isinstance(params, SamplingParams) else [("value", params)]
    default = vars(SamplingParams())
    return ",".join(f"{name}={value}" for name, value in values if default.get(name) != value)


def sample_one_each(
    logits: Tensor, params: list[SamplingParams], uniforms: list[float]
) -> list[int | SampleError]:
    """One token from each row, nothing sampled before."""
    rows = [SampleRow(p, [u]) for p, u in zip(params, uniforms, strict=True)]
    return [token for (token,) in sample(logits, rows)]


def draw(logits: Tensor, params: SamplingParams, count: int) -> Tensor:
    """How often each token comes up in `count` draws from one row, the uniforms spread evenly."""
    (tokens,) = sample(logits[None], [SampleRow(params, [(index + 1) / count for index in range(count)])])
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def allowed(logits: Tensor, params: SamplingParams) -> Tensor:
    """The definition in float64: temperature, min-p, top-k, top-p, renormalised."""
    p = (logits.double() / params.temperature).softmax(-1)
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
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


@pytest.mark.parametrize("params", PARAMS[1:], ids=name_of)
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


def test_the_nucleus_is_a_share_of_a_top_k_beyond_the_candidates() -> None:
    logits = 0.01 * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(top_k=1500, top_p=0.9)
    counts = draw(logits, params, 4000)
    rank = logits.argsort(descending=True).argsort()
    assert 1300 < int(rank[counts.bool()].max()) < 1400  # of nearly equal tokens, nine tenths of 1500


@pytest.mark.parametrize("vocab_size", [10, 50, 2000, 40000])
def test_a_batch_equals_its_rows_alone(vocab_size: int) -> None:
    params = [*PARAMS, *ADJUSTED, *PARAMS]
    count = len(params)
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(count, vocab_size, generator=generator)
    histories = [torch.randint(vocab_size, (7 + row,), generator=generator).tolist() for row in range(count)]
    for position in range(4):
        rows = [
            SampleRow(p, [uniform(row, child, position) for child in range(1 + row % 3)], histories[row], 5)
            for row, p in enumerate(params)
        ]
        together = sample(logits, rows, eos_token_ids={1, 2})
        alone = [sample(logits[i : i + 1], [rows[i]], eos_token_ids={1, 2})[0] for i in range(count)]
        assert together == alone


@pytest.mark.parametrize("params", [PARAMS[1], PARAMS[6], ADJUSTED[4]], ids=name_of)
def test_many_samples_of_a_row_are_the_samples_one_by_one(params: SamplingParams) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(6))
    uniforms = [uniform(1, child, 0) for child in range(20)]
    (together,) = sample(logits, [SampleRow(params, uniforms, [1, 2, 3], 2)])
    assert together == [sample(logits, [SampleRow(params, [u], [1, 2, 3], 2)])[0][0] for u in uniforms]
    assert len(set(together)) > 5


def test_all_that_changes_the_logits_applies_in_the_order_of_vllm() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 1.9, -3.0, 1.0]])
    params = SamplingParams(
        temperature=0.5,
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={1: 3.0, 3: 0.5},
        min_tokens=5,
        stop_token_ids=(5,),
    )
    # Token 0 is forbidden as an end, 5 as a stop token; the bias comes before the penalties.
    expected = torch.tensor([-torch.inf, 2.0 / 2, 0.5, 2.4 / 2 - 2 * 0.25 - 0.5, -3.0 * 2, -torch.inf])
    count = 2000
    row = SampleRow(params, [(index + 1) / count for index in range(count)], [1, 4, 3, 3], 2)
    (tokens,) = sample(logits, [row], eos_token_ids={0})
    shares = torch.bincount(torch.tensor(tokens), minlength=6) / count
    torch.testing.assert_close(shares, (expected / 0.5).softmax(-1), atol=2 / count, rtol=0)


def test_a_row_with_every_token_forbidden_fails_alone() -> None:
    logits = torch.randn(3, 2, generator=torch.Generator().manual_seed(7))
    blocked = SamplingParams(temperature=1.0, min_tokens=1, stop_token_ids=(0, 1))
    for temperature in (0.0, 1.0):
        free = SamplingParams(temperature=temperature)
        rows = [SampleRow(free, [0.4]), SampleRow(blocked, [0.4, 0.5]), SampleRow(free, [0.9])]
        tokens = sample(logits, rows)
        assert all(isinstance(token, SampleError) for token in tokens[1])
        assert len(tokens[1]) == 2
        assert [tokens[0], tokens[2]] == sample(logits[[0, 2]], [rows[0], rows[2]])


def test_greedy_and_top_1_take_the_most_likely_token() -> None:
    logits = torch.randn(30, 100, generator=torch.Generator().manual_seed(3))
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=3.0, top_k=1),
        SamplingParams(temperature=3.0, top_p=1e-9),
        SamplingParams(temperature=3.0, top_p=5e-324),  # zero in float32
    ):
        assert sample_one_each(logits, [params] * 30, [1.0] * 30) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [*PARAMS, *ADJUSTED], ids=name_of)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: SamplingParams) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    clean = sample_one_each(logits, [params] * 3, [0.3, 0.6, 0.9])
    logits[1, 7] = bad
    tokens = sample_one_each(logits, [params] * 3, [0.3, 0.6, 0.9])
    assert isinstance(tokens[1], SampleError)
    assert [tokens[0], tokens[2]] == [clean[0], clean[2]]


@pytest.mark.parametrize("edge", [2**-24, 1.0])
def test_the_ends_of_the_unit_interval_pick_tokens_with_probability(edge: float) -> None:
    logits = torch.full((1, 300), -200.0)
    logits[0, [100, 200]] = 0.0
    expected = 100 if edge < 0.5 else 200
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=2)):
        assert sample_one_each(logits, [params], [edge]) == [expected]


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    logits = torch.tensor([[1.7e38, -1.7e38, 0.0]])
    for temperature in (1e-4, 1.0, 1e6):
        (token,) = sample_one_each(logits, [SamplingParams(temperature=temperature)], [0.2])
        assert token == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_fails_alone_where_its_spread_or_a_penalty_is_more_than_float32(temperature: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    params = SamplingParams(temperature=temperature)
    tiny = replace(params, repetition_penalty=1e-39)
    wide, penalised, plain = sample(logits, [SampleRow(one, [0.1], [0], 1) for one in (params, tiny, params)])
    assert plain == [0]
    (wide_error,), (penalty_error,) = wide, penalised
    assert isinstance(wide_error, SampleError)
    assert isinstance(penalty_error, SampleError)
    assert "not finite" in wide_error.message
    assert "repetition_penalty" in penalty_error.message


def test_a_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(5))
    expected = sample_one_each(logits, [SamplingParams(top_p=0.9)], [0.4])
    for top_k in (60, 61, 2**63, 2**70):
        assert sample_one_each(logits, [SamplingParams(top_p=0.9, top_k=top_k)], [0.4]) == expected


def test_sampling_leaves_the_logits_alone() -> None:
    params = [*PARAMS, *ADJUSTED]
    logits = torch.randn(len(params), 60, generator=torch.Generator().manual_seed(8))
    copy = logits.clone()
    sample(logits, [SampleRow(p, [0.5], [3, 4, 5], 1) for p in params], eos_token_ids={1})
    # One kind alone, too: a row that is not copied out of its batch must not be written.
    for p in params:
        sample(logits, [SampleRow(p, [0.5], [3, 4, 5], 1)] * len(params), eos_token_ids={1})
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
