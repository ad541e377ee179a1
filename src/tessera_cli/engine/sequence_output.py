"""What the engine gives back for one sample after a step."""

from dataclasses import dataclass

from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.stats import RequestMetrics
from tessera_cli.engine.step_result import TokenLogprobs


@dataclass(frozen=True)
class SequenceOutput:
    """What one step did for one sample of a request.

    Attributes:
        request_id: as it was added.
        index: which of the request's n samples.
        new_token_ids: the last one is the stop token where a token ended it.
        logprobs: one for each new token; empty if they were not asked for.
        prompt_logprobs: one for each prompt token, None for the first; they come whole, with the first output
            of index 0, if they were asked for.
        finish_reason: None while it goes on.
        stop_reason: the one of `stop_token_ids` that ended it.
        error: what is wrong, where the finish reason is `ERROR`.
        metrics: with the finish reason.
    """

    request_id: str
    index: int
    new_token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    metrics: RequestMetrics | None = None
