"""Attention over tensors without pages: where paged and packed attention in plain torch both end."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera_cli.attention import AttentionLayer


def visible(layer: AttentionLayer, queries: Tensor, keys: Tensor) -> Tensor:
    """Which positions `keys` int [..., k] the positions `queries` int [..., q] see: bool [..., q, k]."""
    ages = queries[..., :, None] - keys[..., None, :]
    seen = ages >= 0
    return seen if layer.sliding_window is None else seen & (ages < layer.sliding_window)


def dense_attention(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(cap(scale q kᵀ) + mask) v.

    Args:
        layer: scale and soft cap; its window is the business of `mask`.
        q: [batch, heads, num_queries, head_dim].
        k: [batch, kv_heads, num_keys, head_dim], `heads` a multiple of `kv_heads`.
        v: like `k`.
        mask: bool, broadcast to [batch, heads, num_queries, num_keys], True where a query sees a key; None is
            causal with as many queries as keys. Every query sees a key.

    Returns:
        Like `q`.
    """
    grouped = q.shape[1] != k.shape[1]
    if layer.logits_soft_cap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=grouped
        )
    if grouped:
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
    if mask is None:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.transpose(-1, -2)).float() * layer.scale
    scores = layer.logits_soft_cap * (scores / layer.logits_soft_cap).tanh()
    return scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype) @ v
