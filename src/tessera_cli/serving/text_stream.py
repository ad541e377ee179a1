"""From the engine's outputs to text as it comes: one stream for each continuation of a prompt."""

import time
from collections.abc import Callable, Set

from tessera_cli.engine.engine import SequenceOutput
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.stats import RequestMetrics
from tessera_cli.engine.step_result import TokenLogprobs
from tessera_cli.models.tokenizer import TokenStream
from tessera_cli.serving.outputs import CompletionOutput, Logprob
from tessera_cli.serving.stop_strings import StopStringWatcher


class TextStream:
    """Fills a `CompletionOutput` and passes its text on in pieces, which add up to `output.text`.

    No piece ends within a character, and none has a part of the stop string that ends the text.

    Attributes:
        output: what has come so far; its `text` is set at the end.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokens: TokenStream,
        *,
        eos_token_ids: Set[int],
        token_bytes: Callable[[int], bytes],
        arrival_time: float,
    ) -> None:
        """Begin the continuation `index` of a request that arrived at `arrival_time`, monotonic seconds.

        Args:
            params: how the request is sampled; says which stop strings end it.
            tokens: a fresh decoder of the model's tokenizer.
            eos_token_ids: the model's, which are not text.
            token_bytes: the bytes of a token, for its log-probabilities.
        """
        self.output = CompletionOutput(
            index,
            logprobs=None if params.logprobs is None else [],
            metrics=RequestMetrics(arrival_time),
        )
        self._params = params
        self._tokens = tokens
        self._stops = StopStringWatcher(params.stop)
        self._end_token_ids = eos_token_ids | set(params.stop_token_ids)
        self._token_bytes = token_bytes
        self._pieces: list[str] = []

    def take(self, result: SequenceOutput) -> str:
        """Take a step's tokens; the text that is complete with them.

        Where `output.finish_reason` is set afterwards and the result's is not, a stop string has come: the
        engine has to be told. Tokens after the one that completes it are dropped.
        """
        output, now = self.output, time.monotonic()
        piece = ""
        for position, token_id in enumerate(result.new_token_ids):
            self._add(token_id, result.logprobs[position] if result.logprobs else None, now)
            is_last = position == len(result.new_token_ids) - 1
            # A grammar that is complete also ends with STOP, and its last token is text.
            ends_text = result.finish_reason is FinishReason.STOP and token_id in self._end_token_ids
            if not (is_last and ends_text):
                piece += self._feed(self._tokens.step(token_id))
            if self._stops.matched is not None:
                break
        if result.finish_reason is not None:
            piece += self._feed(self._tokens.finish()) + self._stops.finish()
        if self._stops.matched is not None:
            self._end(FinishReason.STOP, self._stops.matched, None, now)
        elif result.finish_reason is not None:
            self._end(result.finish_reason, result.stop_reason, result.error, now)
        if piece:
            self._pieces.append(piece)
        if output.finish_reason is not None:
            output.text = "".join(self._pieces)
        return piece

    def refuse(self, error: str) -> None:
        """End it before it began: the engine did not take the request."""
        self.output.error, self.output.finish_reason = error, FinishReason.ERROR
        self.output.metrics = None

    def _add(self, token_id: int, logprobs: TokenLogprobs | None, now: float) -> None:
        self.output.token_ids.append(token_id)
        if self.output.metrics is not None:
            self.output.metrics.token_times.append(now)
        if self.output.logprobs is not None and logprobs is not None:
            self.output.logprobs.append(Logprob.of(logprobs, self._token_bytes))

    def _feed(self, text: str) -> str:
        # As in vLLM, a stop string counts if the token that completes it comes after `min_tokens`.
        return self._stops.feed(text, may_stop=len(self.output.token_ids) > self._params.min_tokens)

    def _end(
        self, reason: FinishReason, stop_reason: int | str | None, error: str | None, now: float
    ) -> None:
        self.output.finish_reason, self.output.stop_reason, self.output.error = reason, stop_reason, error
        if self.output.metrics is not None:
            self.output.metrics.finished_time = now
