"""Which tokens a draw may come from: min-p, top-k and top-p, each row by its own."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
from tessera_cli.kernels.cpu_truncation import truncate_rows

# Most cuts lie among so many of the largest: a thirtieth of the cost of sorting a vocabulary of 49152.
_NUM_CANDIDATES = 1024


def truncate(weights: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to zero, in place, the weights that a row's min-p, then top-k, then top-p drop.

    Top-p is a share of what the two before it left. The most likely token always stays, and so do tokens
    exactly as likely as the least likely one that stays.

    Args:
        weights: [n, vocab], probabilities in units of the largest of their row, which is 1. A NaN row gets a
            result that means nothing.
        params: of each row.
    """
    if any(p.min_p > 0.0 for p in params):
        weights.masked_fill_(weights < _column([p.min_p for p in params], weights), 0.0)
    vocab_size = weights.shape[-1]
    rows = [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size or p.top_p < 1.0]
    if not rows:
        return
    top_k = torch.tensor([min(params[row].top_k or vocab_size, vocab_size) for row in rows])
    top_p = torch.tensor([params[row].top_p for row in rows], dtype=torch.float64)
    library = load_library() if weights.device.type == "cpu" else None
    if isinstance(library, CpuLibrary):
        truncate_rows(library, weights, torch.tensor(rows), top_k, top_p)
    else:
        truncate_rows_plainly(weights, rows, top_k.to(weights.device), top_p.to(weights.device))


def truncate_rows_plainly(weights: Tensor, rows: Sequence[int], top_k: Tensor, top_p: Tensor) -> None:
    """What `kernels.cpu_truncation.truncate_rows` does, in plain torch."""
    # Copies of a vocabulary's width cost more than the arithmetic: none where every row is cut.
    kept = weights if len(rows) == len(weights) else weights[rows]
    kept.masked_fill_(kept < _thresholds(kept, top_k, top_p)[:, None], 0.0)
    if kept is not weights:
        weights[rows] = kept


def _thresholds(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The least weight that each row keeps [n]."""
    vocab_size = weights.shape[-1]
    num_candidates = min(vocab_size, _NUM_CANDIDATES)
    thresholds, found = _thresholds_among(weights, top_k, top_p, num_candidates)
    if not bool(found.all()):
        missed = (~found).nonzero().flatten()
        thresholds[missed], _ = _thresholds_among(weights[missed], top_k[missed], top_p[missed], vocab_size)
    return thresholds


def _thresholds_among(
    weights: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int
) -> tuple[Tensor, Tensor]:
    """The thresholds, and whether each lies within the `num_candidates` largest."""
    vocab_size = weights.shape[-1]
    rank = torch.arange(num_candidates, device=weights.device)
    largest = _largest(weights, num_candidates).masked_fill(rank >= top_k[:, None], 0.0)
    cumulative = largest.cumsum(dim=-1, dtype=torch.float64)
    total = torch.where(top_k < vocab_size, cumulative[:, -1], _row_sums(weights))
    wanted = torch.where(top_p < 1.0, top_p * total, torch.inf)
    # A token stays if those before it have not yet the wanted mass, which may round to zero.
    stays = (rank < top_k[:, None]) & ((rank == 0) | (cumulative - largest < wanted[:, None]))
    thresholds = largest.masked_fill(~stays, torch.inf).amin(dim=-1)
    # With top-k beyond the candidates even the total is unknown.
    found = torch.where(top_k < vocab_size, top_k <= num_candidates, cumulative[:, -1] >= wanted)
    return thresholds, found | (num_candidates == vocab_size)


def _row_sums(weights: Tensor) -> Tensor:
    """The sum of each row [n], the same bits for a row alone and among others."""
    if weights.device.type == "cpu":
        # torch splits one long row among threads
        return torch.from_numpy(weights.numpy().sum(axis=-1, dtype=np.float64))
    return weights.cumsum(dim=-1, dtype=torch.float64)[:, -1]


def _largest(weights: Tensor, count: int) -> Tensor:
    """The `count` largest of each row, descending [n, count]."""
    if weights.device.type != "cpu":
        return weights.topk(count, dim=-1).values
    # numpy's partition takes a quarter of the time of topk on a CPU.
    start = weights.shape[-1] - count
    highest = np.partition(weights.numpy(), start, axis=-1)[:, start:]
    return torch.from_numpy(np.sort(highest, axis=-1)[:, ::-1].copy())


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
