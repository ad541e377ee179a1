"""What a request does to its logits before anything is drawn: forbidden ends, biases and penalties."""

from collections.abc import Sequence, Set

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera_cli.engine.sampling_params import SamplingParams


def has_penalties(params: SamplingParams) -> bool:
    """Whether the tokens so far change what comes next."""
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


def add_biases(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Add each row's `logit_bias` to `logits` [n, vocab], in place (OpenAI's `logit_bias`)."""
    rows = [row for row, p in enumerate(params) for _ in p.logit_bias]
    if not rows:
        return
    tokens = [token for p in params for token in p.logit_bias]
    values = [bias for p in params for bias in p.logit_bias.values()]
    logits[rows, tokens] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def forbid_ends(
    logits: Tensor,
    params: Sequence[SamplingParams],
    num_output_tokens: Sequence[int],
    eos_token_ids: Set[int],
) -> None:
    """Set to -inf, in place, the tokens that would end a row before its `min_tokens`.

    These are its `stop_token_ids`, and the model's `eos_token_ids` unless they are ignored anyway.
    """
    rows: list[int] = []
    tokens: list[int] = []
    for row, (p, count) in enumerate(zip(params, num_output_tokens, strict=True)):
        if count < p.min_tokens:
            ends = set(p.stop_token_ids) | (set() if p.ignore_eos else eos_token_ids)
            rows += [row] * len(ends)
            tokens += ends
    if rows:
        logits[rows, tokens] = -torch.inf


def penalise(logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> None:
    """Penalise the tokens of one request's prompt and output in its row of logits [vocab], in place.

    Repetition (arXiv 1909.05858, section 4.1, as transformers and vLLM have it): the logit of every token of
    prompt or output is divided by the penalty where it is positive, multiplied where it is not. Then, for the
    tokens of the output alone, `frequency_penalty` times the count and once `presence_penalty` are taken off
    (OpenAI's definition).
    """
    if params.repetition_penalty != 1.0:
        seen = _index(np.unique(np.array([*prompt, *output], dtype=np.int64)), logits)
        before = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(before > 0, before / penalty, before * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        tokens, counts = np.unique(np.array(output, dtype=np.int64), return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        logits[_index(tokens, logits)] -= torch.from_numpy(penalties).to(logits)


def _index(tokens: NDArray[np.int64], logits: Tensor) -> Tensor:
    return torch.from_numpy(tokens).to(logits.device)
