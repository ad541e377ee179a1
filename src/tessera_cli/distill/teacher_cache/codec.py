"""What is kept of a teacher at a target, as tensors on disk."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from tessera_cli.distill.teacher_cache.targets import Targets

# Targets whose logits are in memory at once while a cache is written.
CHUNK_TARGETS = 128


class Kept(NamedTuple):
    """How much of the teacher is kept: sums over `targets` targets of probability mass and of KL in nats."""

    mass: float
    kl: float
    targets: int


class Codec(Protocol):
    """One kind of cache."""

    def encode(self, hidden: Tensor, head: Tensor, key: bytes) -> tuple[dict[str, Tensor], Kept]:
        """What to keep of a document.

        Args:
            hidden: the teacher's final hidden states [n, hidden] at its targets, in the teacher's dtype.
            head: the teacher's head [vocab, hidden], float32.
            key: the document's.

        Returns:
            CPU tensors whose first dimension is the targets, or in which those of a target follow each other;
            and how much of the teacher they hold.
        """
        ...

    def decode(self, parts: Sequence[dict[str, Tensor]], head: Tensor) -> Targets:
        """The targets of documents that follow each other, on the head's device."""
        ...


def log_probs(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Float32 log-probabilities `[n, vocab]` at `temperature`, projected in float32 as the loss does."""
    logits = linear(hidden.float(), head)
    return torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)


def id_dtype(vocab_size: int) -> torch.dtype:
    """The smallest type on disk that holds every id."""
    return torch.uint16 if vocab_size <= 2**16 else torch.int32


def join(parts: Sequence[dict[str, Tensor]], name: str, device: torch.device) -> Tensor:
    """Tensor `name` of all parts, one after the other, on `device`."""
    return torch.cat([part[name] for part in parts]).to(device)
