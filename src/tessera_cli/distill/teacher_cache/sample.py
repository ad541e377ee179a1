"""Kind `sample`: tokens drawn from the teacher at the loss's temperature.

Random-sampling KD (arXiv 2503.16870), with the teacher's own distribution as the proposal.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.distill.teacher_cache.codec import CHUNK_TARGETS, Kept, id_dtype, join, log_probs
from tessera_cli.distill.teacher_cache.targets import SampleTargets


@dataclass(frozen=True)
class SampleCodec:
    """The distinct ids that `num_samples` draws gave, and how often each came.

    `num_ids` (int32 `[n]`) says how many of `ids` and `counts` belong to a target; `entropy` (float32 `[n]`)
    is the teacher's, in nats. The draws follow from `seed` and the document alone. The KL that is told is
    that of the draws' frequencies to the teacher: noise that averages out over positions.
    """

    num_samples: int
    temperature: float
    seed: int

    def encode(self, hidden: Tensor, head: Tensor, key: bytes) -> tuple[dict[str, Tensor], Kept]:
        """See `Codec.encode`."""
        seed = hashlib.sha256(self.seed.to_bytes(16, "little") + key).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "little") >> 1)
        rows: list[tuple[Tensor, Tensor]] = []
        entropies: list[Tensor] = []
        mass = kl = 0.0
        for part in hidden.split(CHUNK_TARGETS):
            log_p = log_probs(part, head, self.temperature)
            entropies.append(-(log_p.exp() * log_p).sum(-1).cpu())
            for row, drawn in zip(log_p.cpu(), draw(log_p, self.num_samples, generator), strict=True):
                ids, counts = drawn.unique(return_counts=True)
                shares = counts.double() / self.num_samples
                mass += row[ids].double().exp().sum().item()
                kl += (shares * (shares.log() - row[ids].double())).sum().item()
                rows.append((ids, counts))
        tensors = {
            "num_ids": torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int32),
            "ids": torch.cat([ids for ids, _ in rows]).to(id_dtype(head.shape[0])),
            "counts": torch.cat([counts for _, counts in rows]).to(_count_dtype(self.num_samples)),
            "entropy": torch.cat(entropies),
        }
        return tensors, Kept(mass=mass, kl=kl, targets=len(hidden))

    def decode(self, parts: Sequence[dict[str, Tensor]], head: Tensor) -> SampleTargets:
        """See `Codec.decode`; rows are padded to the longest with shares of 0."""
        sizes = list(itertools.chain.from_iterable(part["num_ids"].tolist() for part in parts))
        ids = torch.cat([part["ids"].long() for part in parts]).split(sizes)
        counts = torch.cat([part["counts"].float() for part in parts]).split(sizes)
        padded = (torch.nn.utils.rnn.pad_sequence(values, batch_first=True) for values in (ids, counts))
        padded_ids, padded_counts = (values.to(head.device) for values in padded)
        entropy = join(parts, "entropy", head.device)
        return SampleTargets(padded_ids, padded_counts / self.num_samples, entropy)


def draw(log_p: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    """`num_samples` independent ids of each row of log-probabilities `[n, vocab]`: int64, on the CPU.

    The inverse of the cumulative distribution, which is summed in float64.
    """
    cumulative = log_p.double().exp().cumsum(-1).cpu()
    uniform = torch.rand(len(log_p), num_samples, dtype=torch.float64, generator=generator)
    # Scaled to the sum that rounding left; a product that rounds up to it must not be beyond the last id.
    places = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return places.clamp_(max=log_p.shape[1] - 1)


def _count_dtype(num_samples: int) -> torch.dtype:
    return torch.uint8 if num_samples < 2**8 else torch.int32
