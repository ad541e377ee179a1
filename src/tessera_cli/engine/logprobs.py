"""How likely the model found tokens: log-probabilities of its own, before anything changed it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera_cli.engine.sampling_params import MAX_LOGPROBS
from tessera_cli.engine.step_result import TokenLogprobs


def token_logprobs(
    logits: Tensor, token_ids: Sequence[Sequence[int]], num_top: Sequence[int]
) -> list[list[TokenLogprobs] | None]:
    """The log-probabilities of some tokens in each row, and of the most likely ones beside them.

    They are raw, which is vLLM's default: no temperature, penalty, bias or mask has touched them. So they are
    finite. A row of logits that is not finite has none.

    Args:
        logits: float32 [n, vocab], as the model gave them.
        token_ids: the tokens asked for in each row, one or more; all rows may have different numbers.
        num_top: how many of the most likely tokens each row tells, 0 to 20.

    Returns:
        For each row one entry per token, or None.
    """
    width = max(len(tokens) for tokens in token_ids)
    padded = [[*tokens, *[0] * (width - len(tokens))] for tokens in token_ids]
    index = torch.tensor(padded, dtype=torch.int64, device=logits.device)
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, index)
    # One comparison of the whole row for each token of it: more than one only where a prompt forks.
    ranks = torch.stack([(logprobs > column[:, None]).sum(dim=-1) for column in chosen.unbind(1)], 1) + 1
    finite = logprobs.amin(dim=-1).isfinite().tolist()
    tops = _top(logprobs, num_top)
    chosen_lists, rank_lists = chosen.tolist(), ranks.tolist()
    return [
        [
            TokenLogprobs(token, chosen_lists[row][place], rank_lists[row][place], tops[row])
            for place, token in enumerate(tokens)
        ]
        if finite[row]
        else None
        for row, tokens in enumerate(token_ids)
    ]


def _top(logprobs: Tensor, num_top: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    """The `num_top` most likely tokens of each row, with their log-probabilities."""
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(num_top)
    rows = [row for row, count in enumerate(num_top) if count > 0]
    if rows:
        # Always as many as anyone may ask for: the order of equals must not depend on a neighbour's number.
        largest = logprobs[rows].topk(min(MAX_LOGPROBS, logprobs.shape[-1]), dim=-1)
        for row, tokens, values in zip(rows, largest.indices.tolist(), largest.values.tolist(), strict=True):
            tops[row] = tuple(zip(tokens, values, strict=True))[: num_top[row]]
    return tops
