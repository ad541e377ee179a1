"""How one request is sampled and when it ends."""

import math
from dataclasses import dataclass

from tessera_cli.engine.config import require


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends, with vLLM's names and defaults.

    `temperature` 0 is greedy; `top_k` 0 is off; `max_tokens` counts output tokens; `seed` None lets the
    engine draw one. `ignore_eos` ignores the model's end-of-sequence tokens, never `stop_token_ids`.

    Raises:
        UsageError: a value that means nothing.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 16
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Written so that NaN fails every one of them.
        is_temperature = 0.0 <= self.temperature < math.inf
        require("temperature", self.temperature, is_temperature, "a finite number, at least 0")
        require("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "greater than 0 and at most 1")
        is_top_k = isinstance(self.top_k, int) and self.top_k >= 0
        require("top_k", self.top_k, is_top_k, "a whole number, at least 0, which is off")
        is_max_tokens = isinstance(self.max_tokens, int) and self.max_tokens >= 1
        require("max_tokens", self.max_tokens, is_max_tokens, "a whole number, at least 1")
        is_seed = self.seed is None or (isinstance(self.seed, int) and 0 <= self.seed < 2**63)
        require("seed", self.seed, is_seed, "a whole number, from 0 to 2**63 - 1")
        are_token_ids = all(isinstance(token, int) and token >= 0 for token in self.stop_token_ids)
        require("stop_token_ids", self.stop_token_ids, are_token_ids, "token ids, at least 0")
