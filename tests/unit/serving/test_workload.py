"""Requests and arrival times are what they are said to be, from their seed alone."""

import random
from itertools import pairwise

import pytest

from tessera_cli.errors import UsageError
from tessera_cli.serving.workload import gamma_arrivals, nano_requests, random_requests

SHAPE = {"input_len": 20, "output_len": 4, "range_ratio": 0.5, "vocab_size": 50}


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_a_gamma(burstiness: float):
    rate, count = 5.0, 20_000
    arrivals = gamma_arrivals(count, rate, 1, burstiness=burstiness)
    gaps = [after - before for before, after in pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert arrivals[0] == 0.0
    assert min(gaps) >= 0
    # Of shape k the coefficient of variation is k ** -0.5; the mean of n gaps is off by CV / sqrt(n).
    assert mean == pytest.approx(1 / rate, rel=5 * burstiness**-0.5 / count**0.5)
    assert variance**0.5 / mean == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_are_their_seeds():
    assert gamma_arrivals(50, 5.0, 1) == gamma_arrivals(50, 5.0, 1) != gamma_arrivals(50, 5.0, 2)
    assert gamma_arrivals(50, None, 1) is None
    for rate, burstiness in ((0.0, 1.0), (float("inf"), 1.0), (1.0, 0.0), (1.0, float("nan"))):
        with pytest.raises(UsageError):
            gamma_arrivals(2, rate, 0, burstiness=burstiness)


def test_prefixes_are_taken_in_turn_and_come_before_a_prompts_own_tokens():
    work = random_requests(7, seed=3, prefix_len=30, num_prefixes=3, **SHAPE)
    prefixes = [tuple(one.prompt_token_ids[:30]) for one in work]
    assert len(set(prefixes)) == 3
    assert all(prefix == prefixes[index % 3] for index, prefix in enumerate(prefixes))
    assert all(10 <= len(one.prompt_token_ids) - 30 <= 30 for one in work)
    assert len({tuple(one.prompt_token_ids[30:]) for one in work}) == 7


def test_one_prefix_more_or_a_long_prompt_changes_no_length_of_the_others():
    plain = random_requests(6, seed=3, **SHAPE)
    long = random_requests(6, seed=3, long_input_len=99, **SHAPE)
    assert long[:-1] == plain[:-1]
    assert (len(long[-1].prompt_token_ids), long[-1].params) == (99, plain[-1].params)


def test_the_nano_load_is_the_one_that_is_published():
    work = nano_requests(256, input_len=1024, output_len=1024, vocab_size=10_001, seed=0)
    assert sum(len(one.prompt_token_ids) for one in work) == 142_827
    assert sum(one.params.max_tokens for one in work) == 133_966
    random.seed(5)
    again = nano_requests(256, input_len=1024, output_len=1024, vocab_size=50_000, seed=0)
    assert again == work
    ids = {token for one in work for token in one.prompt_token_ids}
    assert (min(ids), max(ids)) == (0, 10_000)
    with pytest.raises(UsageError, match="vocabulary"):
        nano_requests(1, input_len=200, output_len=200, vocab_size=10_000, seed=0)
    with pytest.raises(UsageError, match="up to 99"):
        nano_requests(1, input_len=99, output_len=200, vocab_size=20_000, seed=0)
