"""What the engine's thread tells of the requests that it works on."""

from dataclasses import dataclass

from tessera_cli.errors import TesseraError
from tessera_cli.serving.outputs import CompletionOutput, Logprob


class EngineError(TesseraError):
    """A step of the engine failed, and with it the requests that it ran."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step did for one sample of a request.

    Attributes:
        request_id: the engine's name for the request.
        index: which of its samples.
        text: the text that is complete with the step; may be empty.
        token_ids: the new ones.
        logprobs: of these; empty if they were not asked for.
        prompt_logprobs: of the whole prompt, once, if they were asked for.
        output: the whole sample, where this is its last chunk.
        is_last: whether the request is over with it.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob | None, ...] | None = None
    output: CompletionOutput | None = None
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The end of a request that got no further: an engine fault, or the end of the thread."""

    request_id: str
    error: TesseraError


Event = Chunk | RequestFailed
