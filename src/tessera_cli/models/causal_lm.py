"""What the engine asks of a model, whoever computes it."""

from typing import Protocol

import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer


class Attend(Protocol):
    """Attention over whatever keys and values the caller keeps.

    Takes the layer's index, rotated queries `[num_tokens, num_heads, head_dim]` and keys, and values
    `[num_tokens, num_kv_heads, head_dim]`; returns a tensor shaped like the queries. The model knows neither
    block tables nor documents: whoever binds this does.
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class CausalLMConfig(Protocol):
    """What is known of a model before its weights are read; `max_position_embeddings` is in tokens."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def num_parameters(self) -> int: ...


class CausalLM(Protocol):
    """A decoder-only language model, an `nn.Module`, over packed tokens of any number of sequences.

    No token reaches another one but through `attend`.
    """

    @property
    def config(self) -> CausalLMConfig: ...

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends, in the order of the indices that `attend` is called with."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states, and so of queries, keys and values."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        ...

    def __call__(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normed final hidden states `[num_tokens, hidden]` of `input_ids` and `positions` `[num_tokens]`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[n, vocab]` of `[n, hidden]` hidden states, as the model scales and caps them."""
        ...
