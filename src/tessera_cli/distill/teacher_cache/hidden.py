"""Kind `hidden`: final hidden states, from which the teacher's head makes all logits again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.distill.losses.dense import forward_kl
from tessera_cli.distill.teacher_cache.codec import Kept, join, log_probs
from tessera_cli.distill.teacher_cache.targets import HiddenTargets
from tessera_cli.errors import UsageError

# Targets of a document whose KL is measured; all of them would cost as much as the head does in training.
MEASURED_TARGETS = 4


@dataclass(frozen=True)
class HiddenCodec:
    """`hidden` `[n, hidden]` in `dtype`; float32 holds every teacher dtype exactly."""

    dtype: torch.dtype

    def encode(self, hidden: Tensor, head: Tensor, key: bytes) -> tuple[dict[str, Tensor], Kept]:
        """See `Codec.encode`.

        Raises:
            UsageError: a hidden state is too large for float16.
        """
        kept = hidden.to(self.dtype)
        if not torch.equal(kept.isfinite(), hidden.isfinite()):
            raise UsageError(
                "the teacher's hidden states are too large for float16",
                hint="use `teacher.cache.dtype: float32`",
            )
        measured = slice(0, MEASURED_TARGETS)
        online, cached = (log_probs(states[measured], head, 1.0) for states in (hidden, kept))
        kl = forward_kl(online, cached).double().sum().item()
        return {"hidden": kept.cpu()}, Kept(mass=float(len(online)), kl=kl, targets=len(online))

    def decode(self, parts: Sequence[dict[str, Tensor]], head: Tensor) -> HiddenTargets:
        """See `Codec.decode`."""
        return HiddenTargets(join(parts, "hidden", head.device), head)
