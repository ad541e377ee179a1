"""What a model asks of attention in one layer: all that kernels and models have to agree on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionLayer:
    """How one layer attends; a model has a tuple of them, in layer order.

    Attributes:
        num_heads: query heads, a multiple of `num_kv_heads`.
        num_kv_heads: key-value heads.
        head_dim: elements of a head.
        scale: what q kᵀ is multiplied with.
        sliding_window: tokens that a position sees, itself included: i sees i - window + 1 ... i; None: all.
        logits_soft_cap: c of scores = c tanh(scores / c), applied after `scale` and before the mask;
            None: none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
