"""Log-probabilities: the model's own, ranked, finite, and each row's own business."""

import json
import math

import pytest
import torch
from torch import Tensor

from tessera_cli.engine.logprobs import token_logprobs
from tessera_cli.engine.step_result import TokenLogprobs


def some_logits(rows: int, vocab_size: int = 60) -> Tensor:
    return 4 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))


def test_they_are_the_log_softmax_of_the_logits() -> None:
    logits = some_logits(5)
    exact = logits.double().log_softmax(-1)
    (entries,) = token_logprobs(logits[2:3], [[7, 0, 59]], [0])
    assert entries is not None
    assert [entry.token_id for entry in entries] == [7, 0, 59]
    torch.testing.assert_close(
        torch.tensor([entry.logprob for entry in entries]), exact[2, [7, 0, 59]].float(), atol=1e-5, rtol=0
    )


def test_ranks_count_from_the_most_likely_token() -> None:
    logits = some_logits(1)
    order = logits[0].argsort(descending=True).tolist()
    (entries,) = token_logprobs(logits, [order], [0])
    assert entries is not None
    assert [entry.rank for entry in entries] == list(range(1, 61))


def test_equally_likely_tokens_share_a_rank() -> None:
    (entries,) = token_logprobs(torch.tensor([[1.0, 3.0, 1.0, 0.0]]), [[0, 1, 2, 3]], [0])
    assert entries is not None
    assert [entry.rank for entry in entries] == [2, 1, 2, 4]


@pytest.mark.parametrize("vocab_size", [3, 60])
def test_each_row_tells_as_many_of_the_most_likely_as_it_asks_for(vocab_size: int) -> None:
    logits = some_logits(4, vocab_size)
    counts = [0, 1, 5, 20]
    for row, entries in enumerate(token_logprobs(logits, [[0]] * 4, counts)):
        assert entries is not None
        top = entries[0].top
        best = logits[row].argsort(descending=True)[: counts[row]].tolist()
        assert [token for token, _ in top] == best
        scored = token_logprobs(logits[row : row + 1], [best], [0])[0] if best else []
        assert scored is not None
        assert [value for _, value in top] == [entry.logprob for entry in scored]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = some_logits(6)
    logits[3] = torch.zeros(60)  # nothing but ties
    tokens, counts = [[1], [2, 3], [4], [5], [6, 7, 8], [9]], [0, 3, 20, 2, 5, 1]
    together = token_logprobs(logits, tokens, counts)
    alone = [token_logprobs(logits[i : i + 1], [tokens[i]], [counts[i]])[0] for i in range(6)]
    assert together == alone


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_none_and_json_stays_valid(bad: float) -> None:
    logits = some_logits(3)
    clean = token_logprobs(logits, [[1], [2], [3]], [2, 2, 2])
    logits[1, 7] = bad
    scored = token_logprobs(logits, [[1], [2], [3]], [2, 2, 2])
    assert scored[1] is None
    assert [scored[0], scored[2]] == [clean[0], clean[2]]
    told = [entry for entries in scored if entries is not None for entry in entries]
    json.dumps([(entry.logprob, entry.top) for entry in told], allow_nan=False)


def test_extreme_logits_have_finite_log_probabilities() -> None:
    (entries,) = token_logprobs(torch.tensor([[1e30, -1e30, 0.0]]), [[0, 1]], [3])
    assert entries is not None
    assert entries[0] == TokenLogprobs(0, 0.0, 1, entries[0].top)
    assert all(math.isfinite(value) for _, value in entries[0].top)
