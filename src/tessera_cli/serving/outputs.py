"""What comes of a prompt: its continuations with their text, and what the model thought of the tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.stats import RequestMetrics
from tessera_cli.engine.step_result import TokenLogprobs


@dataclass(frozen=True)
class Logprob:
    """One token and its log-probability under the model itself, before temperature, penalties and masks.

    Attributes:
        token_id: the token.
        token_bytes: what it decodes to; of a character that takes several tokens, its part.
        logprob: the natural logarithm; finite.
        rank: 1 for the likeliest token.
        top: the likeliest tokens at this position, as many as were asked for; they have no `top` themselves.
    """

    token_id: int
    token_bytes: bytes
    logprob: float
    rank: int
    top: tuple["Logprob", ...] = ()

    @classmethod
    def of(cls, logprobs: TokenLogprobs, bytes_of: Callable[[int], bytes]) -> "Logprob":
        """The engine's figures with the bytes of their tokens."""
        values = [value for _, value in logprobs.top]
        top = tuple(
            cls(token_id, bytes_of(token_id), value, 1 + sum(other > value for other in values))
            for token_id, value in logprobs.top
        )
        token_id = logprobs.token_id
        return cls(token_id, bytes_of(token_id), logprobs.logprob, logprobs.rank, top)

    @property
    def token(self) -> str:
        """The bytes as text; those that make no character are U+FFFD."""
        return self.token_bytes.decode(errors="replace")

    def as_content(self) -> dict[str, Any]:
        """An entry of `logprobs.content`, as OpenAI's chat completions have it."""
        return self._fields() | {"top_logprobs": [other._fields() for other in self.top]}

    def as_prompt_entry(self) -> dict[str, Any]:
        """An entry of vLLM's `prompt_logprobs`: this token and the likeliest ones by token id."""
        return {
            str(one.token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.token}
            for one in (self, *self.top)
        }

    def _fields(self) -> dict[str, Any]:
        return {"token": self.token, "logprob": self.logprob, "bytes": list(self.token_bytes)}


@dataclass
class CompletionOutput:
    """One continuation of a prompt, whole once `finish_reason` is set.

    Attributes:
        index: its number among the `n` of the prompt.
        text: without the stop token or stop string that ended it.
        token_ids: with the stop token, or the token that completes the stop string.
        finish_reason: why it ended.
        stop_reason: the stop string, or the one of `stop_token_ids`, that ended it; None for any other end.
        logprobs: one for each token; None if they were not asked for.
        error: what is wrong, where the finish reason is `ERROR`.
        metrics: when its tokens came; None for a request that the engine refused.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[Logprob] | None = None
    error: str | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)


@dataclass
class RequestOutput:
    """What became of one prompt.

    Attributes:
        request_id: the engine's name for it.
        prompt: None for a prompt given as token ids.
        prompt_token_ids: with whatever the tokenizer or the chat template put around it.
        outputs: the `n` continuations, by index.
        prompt_logprobs: one for each prompt token, None for the first and where the model's figures are not
            finite; None if they were not asked for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprob | None] | None = None

    @property
    def error(self) -> str | None:
        """The first error of the continuations, None if all ended well."""
        return next((output.error for output in self.outputs if output.error is not None), None)
