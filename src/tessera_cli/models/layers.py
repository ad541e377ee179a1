"""The parts of a decoder layer, over packed tokens."""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera_cli.models.config import ModelConfig


class Attend(Protocol):
    """Attention over whatever keys and values the caller keeps.

    Takes the layer's index, rotated queries `[num_tokens, num_heads, head_dim]` and keys, and values
    `[num_tokens, num_kv_heads, head_dim]`; returns a tensor shaped like the queries. The model knows neither
    block tables nor documents: whoever binds this does.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (arXiv 1910.07467), weights `[size]`."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_table(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 cosines and sines `[num_tokens, 1, head_dim]` of `positions` `[num_tokens]` (arXiv 2104.09864).

    The halves of a head are rotated against each other, as Llama checkpoints are stored; the sine carries the
    sign of the first half, so that `rotate` is two products and a roll.
    """
    exponents = (
        torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32) / config.head_dim
    )
    angles = positions.to(torch.float32)[:, None] * (config.rope_theta**-exponents)[None, :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads `[num_tokens, heads, head_dim]` by a `rotary_table`; the dtype of `x` is kept."""
    cos, sin = table
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


class DecoderLayer(nn.Module):
    """Attention and gated MLP, each behind a norm and with a residual; projections fused."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        hidden, inner = config.hidden_size, config.intermediate_size

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device)

        def norm() -> RMSNorm:
            return RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)

        self.input_layernorm = norm()
        self.qkv_proj = linear(hidden, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim)
        self.o_proj = linear(self.num_heads * self.head_dim, hidden)
        self.post_attention_layernorm = norm()
        self.gate_up_proj = linear(hidden, 2 * inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, index: int, x: Tensor, table: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """`x` `[num_tokens, hidden]`; `index` is what `attend` is told of the layer's place."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(self.input_layernorm(x)).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        q, k = rotate(qkv[:, : heads + kv_heads], table).split([heads, kv_heads], dim=1)
        attended = attend(index, q, k, qkv[:, heads + kv_heads :])
        x = x + self.o_proj(attended.reshape(x.shape[0], heads * self.head_dim))
        gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down_proj(F.silu(gate) * up)
