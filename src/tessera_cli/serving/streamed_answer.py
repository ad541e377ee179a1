"""What a client learns from the stream of one answer: texts, their times, and the server's token counts."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, NonNegativeInt, ValidationError

from tessera_cli.errors import RunError


class _Delta(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(BaseModel):
    """A part of one sample; a completion's has `text`, a chat's `delta`."""

    index: NonNegativeInt
    text: str | None = None
    delta: _Delta | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Usage(BaseModel):
    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt


class _Chunk(BaseModel):
    """What is read of an event; servers send much more, each its own."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass
class StreamedSample:
    """One of the answers to a prompt. Times are seconds on the client's monotonic clock.

    A server may send several tokens in one chunk and hold back half a character, so that chunks are what a
    client can time: TTFT ends with the first chunk that has text, an inter-token latency lies between two.
    How many tokens there are is the server's word.
    """

    arrival_time: float
    texts: list[str] = field(default_factory=list)
    chunk_times: list[float] = field(default_factory=list)
    finished_time: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def ttft(self) -> float | None:
        """From arrival to the first text; to the end where no token has any."""
        first = self.chunk_times[0] if self.chunk_times else self.finished_time
        return None if first is None else first - self.arrival_time

    @property
    def itl(self) -> list[float]:
        """Between chunks of text."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    @property
    def tpot(self) -> float | None:
        """(E2EL − TTFT) / (tokens − 1); None for fewer than two tokens."""
        if self.e2el is None or self.ttft is None or self.num_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_tokens - 1)

    @property
    def e2el(self) -> float | None:
        """From arrival to the chunk with the finish reason."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time


class StreamedAnswer:
    """The samples of one request, filled chunk by chunk.

    `num_output_tokens` is of all samples together, as `usage` has it. Each sample's `num_tokens` is set where
    that says it: with one sample.
    """

    def __init__(self, arrival_time: float, num_samples: int) -> None:
        self.samples = [StreamedSample(arrival_time) for _ in range(num_samples)]
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self._has_usage = False

    def take(self, event: str, now: float) -> Iterator[tuple[int, str]]:
        """Take one event's JSON; each text in it with its sample's number.

        Raises:
            RunError: the event is an error, or no chunk of this answer.
        """
        try:
            chunk = _Chunk.model_validate_json(event, strict=True)
        except ValidationError as error:
            raise RunError(f"the server sent {_told(error)}") from error
        if chunk.error:
            told = chunk.error.get("message") if isinstance(chunk.error, dict) else None
            raise RunError(f"the server failed: {told or chunk.error}")
        if chunk.usage is not None:
            self._has_usage = True
            self.num_prompt_tokens = chunk.usage.prompt_tokens
            self.num_output_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            if choice.index >= len(self.samples):
                raise RunError(f"the server sent what is no chunk of this answer: index {choice.index}")
            text = _take_choice(self.samples[choice.index], choice, now)
            if text:
                yield choice.index, text

    def check_complete(self) -> None:
        """See that every sample has ended and the tokens were counted.

        Raises:
            RunError: they have not.
        """
        if any(sample.finish_reason is None for sample in self.samples):
            raise RunError("the server's stream ended before the answer did")
        if not self._has_usage:
            raise RunError("the server sent no usage, so its tokens are not counted")
        if len(self.samples) == 1:
            self.samples[0].num_tokens = self.num_output_tokens


def _take_choice(sample: StreamedSample, choice: _Choice, now: float) -> str:
    delta = choice.delta or _Delta(content=choice.text)
    # A reasoning model's thoughts are tokens like others, though no part of the answer.
    text = delta.content or ""
    if text or delta.reasoning_content or delta.reasoning:
        sample.chunk_times.append(now)
    if text:
        sample.texts.append(text)
    if choice.logprobs:
        sample.logprobs.append(choice.logprobs)
    if choice.finish_reason:
        sample.finished_time, sample.finish_reason = now, choice.finish_reason
        sample.stop_reason = choice.stop_reason
    return text


def _told(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"what is no JSON: {first['ctx']['error']}"
    place = ".".join(map(str, first["loc"]))
    return f"what is no chunk of an answer: {place + ': ' if place else ''}{first['msg']}"
