"""Logits to token ids: each row by its own parameters and random number, whatever its neighbours do."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import SampleError

# Below this sampling is greedy in all but near-ties, and the division by it may overflow.
GREEDY_TEMPERATURE = 1e-5
# Most cuts lie among so many of the largest: a thirtieth of the cost of sorting a vocabulary of 49152.
_NUM_CANDIDATES = 1024


def uniform(seed: int, child_index: int, position: int) -> float:
    """A number in (0, 1], a multiple of 2**-24, that depends on nothing but the arguments.

    `position` is that of the token to be sampled, counted from the start of the prompt.
    """
    key = f"{seed}/{child_index}/{position}".encode()
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return ((int.from_bytes(digest) >> 40) + 1) / 2**24


def sample(
    logits: Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[int | SampleError]:
    """Sample one token per row; a row that has a NaN or an infinity gets a `SampleError`.

    Temperature is applied first, then top-k, then top-p over what top-k left; the most likely token always
    stays, and so do tokens exactly as likely as the least likely one that stays. The token is the inverse of
    the cumulative distribution, in vocabulary order, at the row's uniform number.

    Args:
        logits: float32 [n, vocab].
        params: of each row.
        uniforms: of each row, in (0, 1].
    """
    highest, tokens = logits.max(dim=-1)
    finite = highest.isfinite() & logits.amin(dim=-1).isfinite()
    rows = [row for row, p in enumerate(params) if p.temperature >= GREEDY_TEMPERATURE]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        weights = logits[index].sub_(highest[index, None])
        weights.div_(_column([params[row].temperature for row in rows], weights)).exp_()
        _filter(weights, [params[row] for row in rows])
        cumulative = weights.cumsum(dim=-1)
        # The least index that reaches a target in (0, total] always carries weight itself.
        targets = _column([uniforms[row] for row in rows], weights) * cumulative[:, -1:]
        tokens[index] = torch.searchsorted(cumulative, targets).squeeze(-1)
    return [
        token if ok else SampleError("the model's logits are not finite")
        for token, ok in zip(tokens.tolist(), finite.tolist(), strict=True)
    ]


def _filter(weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to zero, in place, the weights [n, vocab] that top-k and top-p drop."""
    vocab_size = weights.shape[-1]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    if not rows:
        return
    index = torch.tensor(rows, device=weights.device)
    kept = weights[index]
    top_k = torch.tensor(
        [min(params[row].top_k or vocab_size, vocab_size) for row in rows], device=weights.device
    )
    top_p = _column([params[row].top_p for row in rows], weights).squeeze(-1)
    num_candidates = min(vocab_size, _NUM_CANDIDATES)
    thresholds, found = _thresholds(kept, top_k, top_p, num_candidates)
    if not bool(found.all()):
        missed = (~found).nonzero().flatten()
        thresholds[missed], _ = _thresholds(kept[missed], top_k[missed], top_p[missed], vocab_size)
    weights[index] = kept.masked_fill_(kept < thresholds[:, None], 0.0)


def _thresholds(weights: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """The least weight that each row keeps, and whether it lies within the `num_candidates` largest.

    A NaN row gets a threshold that means nothing; `sample` refuses the row.
    """
    vocab_size = weights.shape[-1]
    rank = torch.arange(num_candidates, device=weights.device)
    largest = weights.topk(num_candidates, dim=-1).values
    largest = largest.masked_fill(rank >= top_k[:, None], 0.0)
    cumulative = largest.cumsum(dim=-1)
    total = torch.where(top_k < vocab_size, cumulative[:, -1], weights.sum(dim=-1))
    wanted = torch.where(top_p < 1.0, top_p * total, torch.inf)
    # A token stays if those before it have not yet the wanted mass, which may round to zero.
    stays = (rank < top_k[:, None]) & ((rank == 0) | (cumulative - largest < wanted[:, None]))
    thresholds = largest.masked_fill(~stays, torch.inf).amin(dim=-1)
    found = (top_k <= num_candidates) | (cumulative[:, -1] >= wanted)
    return thresholds, found | (num_candidates == vocab_size)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
