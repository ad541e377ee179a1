"""The parts of a decoder layer, over packed tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera_cli.models.causal_lm import Attend
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.operators import Operators, add
from tessera_cli.models.rope import RotaryTable


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (arXiv 1910.07467), weights `[size]`."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class DecoderLayer(nn.Module):
    """Attention and gated MLP, each with a norm before or after it and a residual; projections fused."""

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.rotates = config.layer_rotates[index] if config.layer_rotates else True
        self.post_norm = config.post_norm
        self.qk_norm = config.qk_norm
        self.residual_multiplier = config.residual_multiplier
        hidden, inner = config.hidden_size, config.intermediate_size
        query, key_value = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        def norm(size: int = hidden) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)

        if not self.post_norm:
            self.input_layernorm = norm()
        self.qkv_proj = linear(hidden, query + 2 * key_value, config.qkv_bias)
        if self.qk_norm != "none":
            self.q_norm = norm(self.head_dim if self.qk_norm == "head" else query)
            self.k_norm = norm(self.head_dim if self.qk_norm == "head" else key_value)
        self.o_proj = linear(query, hidden, config.o_bias)
        self.post_attention_layernorm = norm()
        self.gate_up_proj = linear(hidden, 2 * inner, config.mlp_bias)
        self.down_proj = linear(inner, hidden, config.mlp_bias)
        if self.post_norm:
            self.post_feedforward_layernorm = norm()

    def forward(
        self, index: int, x: Tensor, table: RotaryTable, attend: Attend, operators: Operators
    ) -> Tensor:
        """`x` `[num_tokens, hidden]`, left as it is; `index` is what `attend` is told of the place."""
        if self.post_norm:
            attended = self._attention(index, x, table, attend, operators)
            x = add(x, self._scaled(self.post_attention_layernorm(attended)))
            return add(x, self._scaled(self.post_feedforward_layernorm(self._mlp(x, operators))))
        attended = self._attention(
            index, operators.rms_norm(x, self.input_layernorm), table, attend, operators
        )
        x, normed = operators.add_rms_norm(x, self._scaled(attended), self.post_attention_layernorm)
        return add(x, self._scaled(self._mlp(normed, operators)))

    def _attention(
        self, index: int, x: Tensor, table: RotaryTable, attend: Attend, operators: Operators
    ) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x).view(x.shape[0], heads + 2 * kv_heads, self.head_dim)
        qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
        if self.qk_norm != "none":
            qk = self._norm_heads(qk)
        if self.rotates:
            qk = operators.rotate(qk, table)
        q, k = qk.split([heads, kv_heads], dim=1)
        return self.o_proj(attend(index, q, k, v).reshape(x.shape[0], heads * self.head_dim))

    def _norm_heads(self, qk: Tensor) -> Tensor:
        q, k = qk.split([self.num_heads, self.num_kv_heads], dim=1)
        if self.qk_norm == "head":
            return torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)
        q, k = self.q_norm(q.flatten(1)), self.k_norm(k.flatten(1))
        return torch.cat([q, k], dim=1).view_as(qk)

    def _mlp(self, x: Tensor, operators: Operators) -> Tensor:
        return self.down_proj(operators.silu_and_mul(self.gate_up_proj(x)))

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.residual_multiplier == 1.0 else update.mul_(self.residual_multiplier)
