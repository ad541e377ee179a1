"""Kind `topk`: the likeliest tokens at the loss's temperature, and one bucket for all others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.distill.teacher_cache.codec import CHUNK_TARGETS, Kept, id_dtype, join, log_probs
from tessera_cli.distill.teacher_cache.targets import TopKTargets


@dataclass(frozen=True)
class TopKCodec:
    """`ids` and `log_probs` (float16) `[n, k]`, and `rest` (float32 `[n]`), the others' log-probability.

    The KL that is told is that to the same distribution with the rest spread evenly over the other tokens:
    the most that can be read from the cache.
    """

    k: int
    temperature: float

    def encode(self, hidden: Tensor, head: Tensor, key: bytes) -> tuple[dict[str, Tensor], Kept]:
        """See `Codec.encode`."""
        chunks = [self._chunk(part, head) for part in hidden.split(CHUNK_TARGETS)]
        tensors = {name: torch.cat([chunk[0][name] for chunk in chunks]) for name in chunks[0][0]}
        mass, kl = (sum(chunk[1][i] for chunk in chunks) for i in range(2))
        return tensors, Kept(mass=mass, kl=kl, targets=len(hidden))

    def decode(self, parts: Sequence[dict[str, Tensor]], head: Tensor) -> TopKTargets:
        """See `Codec.decode`; what float16 rounds away is made good, so that a row is a distribution."""
        ids = join([{"ids": part["ids"].long()} for part in parts], "ids", head.device)
        kept = join(parts, "log_probs", head.device).float()
        rest = join(parts, "rest", head.device)[:, None]
        all_kept = torch.log1p(-rest.exp())
        return TopKTargets(ids, torch.cat([torch.log_softmax(kept, -1) + all_kept, rest], -1))

    def _chunk(self, hidden: Tensor, head: Tensor) -> tuple[dict[str, Tensor], tuple[float, float]]:
        log_p = log_probs(hidden, head, self.temperature)
        entropy_terms = (log_p.exp() * log_p).double().sum(-1)
        top, ids = log_p.topk(self.k, -1)
        # Summed over the rest itself: 1 − Σ kept would lose the digits of a small one.
        rest = torch.logsumexp(log_p.scatter(1, ids, -math.inf), -1)
        rest_mass = rest.double().exp()
        even = rest.double() - math.log(head.shape[0] - self.k)
        kl = entropy_terms - (top.exp() * top).double().sum(-1) - rest_mass * even
        tensors = {
            "ids": ids.to(id_dtype(head.shape[0])).cpu(),
            "log_probs": top.half().cpu(),
            "rest": rest.cpu(),
        }
        return tensors, ((1 - rest_mass).sum().item(), kl.sum().item())
