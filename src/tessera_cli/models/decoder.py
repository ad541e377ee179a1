"""The one native decoder: the trainer trains it, the engine serves it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera_cli.attention import AttentionLayer
from tessera_cli.models.causal_lm import Attend
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.layers import DecoderLayer, RMSNorm
from tessera_cli.models.operators import Operators, TorchOperators
from tessera_cli.models.rope import RotaryTable, inverse_frequencies, rotary_table


class Decoder(nn.Module):
    """A decoder of the Llama family over packed tokens of any number of sequences, without padding.

    What a token may see is the business of the `attend` that the caller passes: blocks of a paged cache when
    serving, isolated documents when training.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        vocab, hidden = config.vocab_size, config.hidden_size
        embedding = torch.empty(vocab, hidden, dtype=dtype, device=device)
        if not embedding.is_meta:  # where nothing can be drawn, and torch would load its compiler to do it
            nn.init.normal_(embedding)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=False)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, dtype=dtype, device=device)
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(hidden, vocab, bias=False, dtype=dtype, device=device)
        )
        # No buffer: it is no weight, and `to_empty` would leave garbage in one.
        self._frequencies, self._rotary_factor = inverse_frequencies(config)

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends."""
        return self.config.attention_layers

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states, and of weights that are not quantised."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.norm.weight.device

    @property
    def head_weight(self) -> Tensor:
        """The output projection `[vocab, hidden]`: the embedding itself where the two are tied.

        A decoder with `linear_layers` for inference has none.
        """
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        operators: Operators | None = None,
    ) -> Tensor:
        """Final hidden states `[num_tokens, hidden]` of `input_ids` and `positions` `[num_tokens]`.

        They are normed, and divided by `logits_divisor`: times `head_weight` they are the logits. Without
        `operators` all is plain torch, which has gradients.
        """
        operators = operators or TorchOperators()
        x, table = self.enter(input_ids, positions)
        for index, layer in enumerate(self.layers):
            x = layer(index, x, table, attend, operators)
        return self.leave(operators.rms_norm(x, self.norm))

    def enter(self, input_ids: Tensor, positions: Tensor) -> tuple[Tensor, RotaryTable]:
        """What the first layer gets: embedded tokens `[num_tokens, hidden]`, the table of their positions."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        x = self.embed_tokens(input_ids)
        if self.config.embedding_multiplier != 1.0:
            x = x * self.config.embedding_multiplier
        return x, rotary_table(self._frequencies, self._rotary_factor, positions)

    def leave(self, normed: Tensor) -> Tensor:
        """Final hidden states of what the final norm gives, both `[num_tokens, hidden]`."""
        return normed if self.config.logits_divisor == 1.0 else normed / self.config.logits_divisor

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[n, vocab]` of final hidden states `[n, hidden]`."""
        if self.lm_head is None:
            return F.linear(hidden, self.embed_tokens.weight).float()
        return self.lm_head(hidden).float()
