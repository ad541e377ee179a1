"""The one decoder: the trainer trains it, the engine serves it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera_cli.models.config import ModelConfig
from tessera_cli.models.layers import Attend, DecoderLayer, RMSNorm, rotary_table


class Decoder(nn.Module):
    """A Llama-architecture decoder over packed tokens of any number of sequences, without padding.

    What a token may see is the business of the `attend` that the caller passes: blocks of a paged cache when
    serving, isolated documents when training.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(vocab, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(hidden, vocab, bias=False, dtype=dtype, device=device)
        )

    @property
    def head_weight(self) -> Tensor:
        """The output projection `[vocab, hidden]`: the embedding itself where the two are tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normed final hidden states `[num_tokens, hidden]` of `input_ids` and `positions` `[num_tokens]`."""
        table = rotary_table(self.config, positions)
        x = self.embed_tokens(input_ids)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, table, attend)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[n, vocab]` of final hidden states `[n, hidden]`."""
        return F.linear(hidden, self.head_weight).float()
