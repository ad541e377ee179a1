"""Logits to token ids: each row by its own parameters and random numbers, whatever its neighbours do."""

import hashlib
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessera_cli.engine.penalties import add_biases, forbid_ends, has_penalties, penalise
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import SampleError
from tessera_cli.engine.structured_output import Matcher, bitmask_bytes
from tessera_cli.engine.truncation import truncate

# Below this sampling is greedy in all but near-ties, and the division by it may overflow.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits is sampled for.

    Attributes:
        params: of the request.
        uniforms: one number in (0, 1] for each token that is wanted.
        token_ids: prompt and output so far; read where penalties or `min_tokens` ask for them.
        num_prompt_tokens: so many of them are the prompt.
        matcher: where the output stands in its form, if it has one.
    """

    params: SamplingParams
    uniforms: Sequence[float]
    token_ids: Sequence[int] = ()
    num_prompt_tokens: int = 0
    matcher: Matcher | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_TEMPERATURE

    @property
    def is_adjusted(self) -> bool:
        """Whether anything but the temperature comes between the model's logits and the choice."""
        p = self.params
        return self.matcher is not None or bool(p.logit_bias) or p.min_tokens > 0 or has_penalties(p)


def uniform(seed: int, child_index: int, position: int) -> float:
    """A number in (0, 1], a multiple of 2**-24, that depends on nothing but the arguments.

    `position` is that of the token to be sampled, counted from the start of the prompt.
    """
    key = f"{seed}/{child_index}/{position}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return ((int.from_bytes(digest) >> 40) + 1) / 2**24


def sample(
    logits: Tensor, rows: Sequence[SampleRow], *, eos_token_ids: Set[int] = frozenset()
) -> list[list[int | SampleError]]:
    """Sample as many tokens from each row as it has uniforms.

    The order is vLLM's: the mask of the structured output, the ends that `min_tokens` forbids, `logit_bias`,
    the penalties; for greedy rows the most likely token; for others temperature, min-p, top-k, top-p over
    what these left, and the inverse of the cumulative distribution, in vocabulary order, at the row's uniform
    numbers. A row that holds a NaN or an infinity, or spans more than float32 can, or whose every token is
    forbidden, fails alone: it has a `SampleError` for each token.

    Args:
        logits: float32 [n, vocab]; left as they are.
        rows: what each of them is for.
        eos_token_ids: the model's end-of-sequence tokens.
    """
    # The spread too: where it overflows, log-probabilities are not finite.
    finite = (logits.amax(dim=-1) - logits.amin(dim=-1)).isfinite()
    results: list[list[int | SampleError]] = [[] for _ in rows]
    plain = [row for row, item in enumerate(rows) if item.is_greedy and not item.is_adjusted]
    if plain:
        best = argmax(logits if len(plain) == len(rows) else logits[plain])
        for row, token in zip(plain, best, strict=True):
            results[row] = [token] * len(rows[row].uniforms)
    others = [row for row, item in enumerate(rows) if not item.is_greedy or item.is_adjusted]
    if others:
        chosen = _sample_copied(logits[others], [rows[row] for row in others], eos_token_ids)
        for row, tokens in zip(others, chosen, strict=True):
            results[row] = tokens
    # Read last: on a GPU the host waits for the step once, not twice.
    for row, is_finite in enumerate(finite.tolist()):
        if not is_finite:
            results[row] = [SampleError("the model's logits are not finite")] * len(rows[row].uniforms)
    return results


def argmax(logits: Tensor) -> list[int]:
    """The most likely token of each row of [n, vocab], the first of equals."""
    if logits.device.type == "cpu":
        return [int(token) for token in logits.numpy().argmax(axis=-1)]  # a tenth of the time of torch's
    return logits.argmax(dim=-1).tolist()


def _sample_copied(
    logits: Tensor, rows: Sequence[SampleRow], eos_token_ids: Set[int]
) -> list[list[int | SampleError]]:
    """Sample rows of `logits` [n, vocab], which it may overwrite."""
    _adjust(logits, rows, eos_token_ids)
    highest = logits.amax(dim=-1)
    results: list[list[int | SampleError]] = [[] for _ in rows]
    greedy = [row for row, item in enumerate(rows) if item.is_greedy]
    if greedy:
        for row, token in zip(greedy, argmax(logits[greedy]), strict=True):
            results[row] = [token] * len(rows[row].uniforms)
    random = [row for row, item in enumerate(rows) if not item.is_greedy]
    if random:
        weights = logits[random] if greedy else logits
        drawn = _draw(weights.sub_(highest[random, None]), [rows[row] for row in random])
        for row, tokens in zip(random, drawn, strict=True):
            results[row] = list(tokens)
    for row, value in enumerate(highest.tolist()):
        if not math.isfinite(value):
            results[row] = [_no_token(rows[row], value)] * len(rows[row].uniforms)
    return results


def _adjust(logits: Tensor, rows: Sequence[SampleRow], eos_token_ids: Set[int]) -> None:
    """Apply, in place, all that can change which token is the most likely one."""
    params = [row.params for row in rows]
    _mask_forms(logits, rows)
    num_output_tokens = [len(row.token_ids) - row.num_prompt_tokens for row in rows]
    forbid_ends(logits, params, num_output_tokens, eos_token_ids)
    add_biases(logits, params)
    for row, item in enumerate(rows):
        if has_penalties(item.params):
            split = item.num_prompt_tokens
            penalise(logits[row], item.params, item.token_ids[:split], item.token_ids[split:])


def _mask_forms(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Set to -inf, in place, the tokens that a row's structured output does not allow next."""
    matchers = [(row, item.matcher) for row, item in enumerate(rows) if item.matcher is not None]
    if not matchers:
        return
    vocab_size = logits.shape[-1]
    bits = np.empty((len(matchers), bitmask_bytes(vocab_size)), dtype=np.uint8)
    for place, (_, matcher) in enumerate(matchers):
        matcher.fill_mask(bits[place])
    forbidden = np.unpackbits(bits, axis=-1, count=vocab_size, bitorder="little") == 0
    index = torch.tensor([row for row, _ in matchers], device=logits.device)
    mask = torch.from_numpy(forbidden).to(logits.device)
    logits[index] = logits[index].masked_fill_(mask, -torch.inf)


def _draw(relative: Tensor, rows: Sequence[SampleRow]) -> list[list[int]]:
    """Draw from rows [n, vocab] of logits less the highest of their row, which it overwrites."""
    weights = relative.div_(_column([row.params.temperature for row in rows], relative)).exp_()
    truncate(weights, [row.params for row in rows])
    cumulative = weights.cumsum(dim=-1)
    width = max(len(row.uniforms) for row in rows)
    padded = [[*row.uniforms, *[1.0] * (width - len(row.uniforms))] for row in rows]
    # The least index that reaches a target in (0, total] always carries weight itself.
    targets = torch.tensor(padded, dtype=weights.dtype, device=weights.device) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, targets).tolist()
    return [drawn[: len(row.uniforms)] for drawn, row in zip(tokens, rows, strict=True)]


def _no_token(row: SampleRow, highest: float) -> SampleError:
    if highest != -math.inf:
        return SampleError("repetition_penalty makes the logits larger than float32 can hold")
    if row.matcher is not None and row.matcher.error is not None:
        return SampleError(f"the structured output failed: {row.matcher.error}")
    return SampleError("no token is left: structured_output, logit_bias, min_tokens and penalties forbid all")


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
