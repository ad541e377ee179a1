"""What the routes share: the model that is served, and one generation for one request."""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.serving.api.config import ServerConfig
from tessera_cli.serving.api.errors import NotReadyError, UnknownModelError
from tessera_cli.serving.api.metrics import ServerMetrics
from tessera_cli.serving.api.protocol import ClientFields
from tessera_cli.serving.async_llm import AsyncLLM
from tessera_cli.serving.engine_events import Chunk, EngineError
from tessera_cli.serving.generation import Generation
from tessera_cli.serving.outputs import CompletionOutput

# Tokenising this many characters takes about a millisecond; more is done beside the event loop.
_LARGE = 4096


@dataclass
class Usage:
    """Token counts of one HTTP request; `completion_tokens` has the stop tokens, as the engine made them."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_body(self) -> dict[str, Any]:
        """`usage` as completions and chats have it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Service:
    """One HTTP request's way to the engine."""

    def __init__(self, request: Request, llm: AsyncLLM) -> None:
        self.llm = llm
        self.config: ServerConfig = request.app.state.config
        self.metrics: ServerMetrics = request.app.state.metrics
        self.model = self.config.model_names[0]
        self.created = int(time.time())
        self._state = request.state

    def new_id(self, prefix: str) -> str:
        """An id that nothing else has."""
        return f"{prefix}-{uuid.uuid4().hex}"

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            UnknownModelError: `name` is none of the served model's.
        """
        if name is not None and name not in self.config.model_names:
            raise UnknownModelError(
                f"no model {name!r} here",
                hint=f"the model is {', '.join(self.config.model_names)}",
                param="model",
            )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; a long one does not keep the event loop from others."""

        def encode() -> list[int]:
            return self.llm.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await asyncio.to_thread(encode) if len(text) > _LARGE else encode()

    def room(self, prompt: list[int]) -> int:
        """The output tokens for which the context has room, at least one, which the engine then refuses."""
        return max(1, self.llm.max_model_len - len(prompt))

    async def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        request: ClientFields,
    ) -> "Answering":
        """Begin to continue `prompts`.

        Raises:
            TesseraError: as `AsyncLLM.generate` does.
        """
        generation = await self.llm.generate(
            prompts,
            params,
            priority=request.priority or 0,
            cache_salt=request.cache_salt,
            timeout=self.config.request_timeout,
        )
        self._state.at_end.append(generation.close)
        usage = Usage(sum(map(len, prompts)))
        self._state.log["model"] = request.model
        user = request.safety_identifier if request.user is None else request.user
        if user is not None:
            self._state.log["user"] = user
        return Answering(generation, usage, self._note_end, len(prompts), params.n)

    def _note_end(self, output: CompletionOutput, usage: Usage) -> None:
        log = self._state.log
        log["prompt_tokens"], log["completion_tokens"] = usage.prompt_tokens, usage.completion_tokens
        log.setdefault("finish_reasons", []).append(output.finish_reason)
        self.metrics.observe(output)


class Answering:
    """A generation with its account: iterate over it for lists of (choice index, chunk).

    Attributes:
        usage: grows as tokens come.
        num_choices: prompts times samples.
    """

    def __init__(
        self,
        generation: Generation,
        usage: Usage,
        note_end: Callable[[CompletionOutput, Usage], None],
        num_prompts: int,
        num_samples: int,
    ) -> None:
        self.usage = usage
        self.num_choices = num_prompts * num_samples
        self._generation = generation
        self._note_end = note_end
        self._num_samples = num_samples

    def __aiter__(self) -> "Answering":
        return self

    async def __anext__(self) -> list[tuple[int, Chunk]]:
        """What has come since the last turn.

        Raises:
            EngineError: the engine failed, or could not sample a token.
            RequestTimeoutError: it took too long.
        """
        chunks = await anext(self._generation)
        for chunk in chunks:
            self.usage.completion_tokens += len(chunk.token_ids)
            output = chunk.output
            if output is None:
                continue
            if output.index == 0 and output.metrics is not None:
                self.usage.cached_tokens += output.metrics.num_cached_tokens
            self._note_end(output, self.usage)
            if output.finish_reason is FinishReason.ERROR:
                raise EngineError(f"the request failed: {output.error}")
        return [(self._generation.place(c) * self._num_samples + c.index, c) for c in chunks]

    async def outputs(self) -> list[CompletionOutput]:
        """All choices, whole."""
        outputs: dict[int, CompletionOutput] = {}
        async for chunks in self:
            outputs |= {index: chunk.output for index, chunk in chunks if chunk.output is not None}
        return [outputs[index] for index in sorted(outputs)]


async def _service(request: Request) -> Service:
    llm = request.app.state.async_llm
    if llm is None:
        raise NotReadyError("the model is still being loaded", hint="try again later")
    return Service(request, llm)


Serving = Annotated[Service, Depends(_service)]
