"""`POST /v1/completions`: text after text."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from tessera_cli.errors import TesseraError, UsageError
from tessera_cli.serving.api import sse
from tessera_cli.serving.api.errors import named_as, tell
from tessera_cli.serving.api.json_route import JsonRoute
from tessera_cli.serving.api.protocol import CompletionRequest
from tessera_cli.serving.api.service import Answering, Service, Serving
from tessera_cli.serving.engine_events import Chunk
from tessera_cli.serving.outputs import Logprob

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, service: Serving) -> Response:
    """Continue one prompt or several, `n` times each; choices are numbered prompt by prompt."""
    service.check_model(body.model)
    prompts = await _prompts(body, service)
    wants_none = body.max_tokens == 0
    if wants_none and not body.echo:
        raise UsageError("max_tokens is 0 and echo is not set, so nothing is asked for", param="max_tokens")
    with named_as(body.field_names):
        params = body.sampling_params(
            # The engine ends with a token; where none is wanted it is made and not shown.
            max_tokens=1 if wants_none else body.max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        answering = await service.generate([ids for _, ids in prompts], params, body)
    completion = _Completion(body, service, answering, prompts, shows_output=not wants_none)
    if body.stream:
        return sse.stream(completion.events(body.includes_usage))
    return JSONResponse(await completion.whole())


class _Completion:
    """One answer on its way."""

    def __init__(
        self,
        body: CompletionRequest,
        service: Service,
        answering: Answering,
        prompts: list[tuple[str, list[int]]],
        *,
        shows_output: bool,
    ) -> None:
        self._answering = answering
        self._prompts = prompts
        self._num_samples = answering.num_choices // len(prompts)
        self._echo = bool(body.echo)
        self._wants_logprobs = body.logprobs is not None
        self._shows_output = shows_output
        self._token_bytes = service.llm.token_bytes
        self._prompt_logprobs: dict[int, tuple[Logprob | None, ...]] = {}
        self._offsets = [0] * answering.num_choices
        self._echoed: set[int] = set()
        self._head = {
            "id": service.new_id("cmpl"),
            "object": "text_completion",
            "created": service.created,
            "model": service.model,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece: its choices are what the stream's add up to."""
        choices: dict[int, dict[str, Any]] = {}
        async for chunks in self._answering:
            for index, chunk in chunks:
                part = self._choice(index, chunk)
                choice = choices.setdefault(index, part)
                if choice is not part:
                    _append(choice, part)
        return self._head | {"choices": [choices[i] for i in sorted(choices)], "usage": self._usage()}

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        usage: dict[str, Any] = {"usage": None} if include_usage else {}
        try:
            async for chunks in self._answering:
                lines = []
                for index, chunk in chunks:
                    choice = self._choice(index, chunk)
                    if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
                        lines.append(sse.event(self._head | {"choices": [choice]} | usage))
                if lines:
                    yield b"".join(lines)
        except TesseraError as error:
            yield sse.event(tell(error)) + sse.DONE
            return
        if include_usage:
            yield sse.event(self._head | {"choices": [], "usage": self._usage()})
        yield sse.DONE

    def _choice(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """What `chunk` adds to the choice, behind the prompt where that is to come first."""
        place = index // self._num_samples
        if chunk.prompt_logprobs is not None:
            self._prompt_logprobs[place] = chunk.prompt_logprobs
        text = chunk.text if self._shows_output else ""
        rows: list[Logprob | None] = list(chunk.logprobs) if self._shows_output else []
        tokens = [row.token for row in rows if row is not None]
        if self._echo and index not in self._echoed:
            self._echoed.add(index)
            prompt, prompt_ids = self._prompts[place]
            text = prompt + text
            if self._wants_logprobs:
                echoed = self._prompt_logprobs[place]
                tokens = [self._token_bytes(i).decode(errors="replace") for i in prompt_ids] + tokens
                rows = [*echoed, *rows]
        output = chunk.output
        finish_reason = stop_reason = None
        if output is not None:
            finish_reason = str(output.finish_reason) if self._shows_output else "length"
            stop_reason = output.stop_reason if self._shows_output else None
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens, rows) if self._wants_logprobs else None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }

    def _logprobs(self, index: int, tokens: list[str], rows: list[Logprob | None]) -> dict[str, Any] | None:
        if not tokens:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if row is None else row.logprob for row in rows],
            "top_logprobs": [
                None if row is None else {one.token: one.logprob for one in (row, *row.top)} for row in rows
            ],
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, Any]:
        if not self._shows_output:
            self._answering.usage.completion_tokens = 0
        return self._answering.usage.as_body()


def _append(choice: dict[str, Any], part: dict[str, Any]) -> None:
    choice["text"] += part["text"]
    for name in ("finish_reason", "stop_reason"):
        choice[name] = part[name]
    if part["logprobs"] is None:
        return
    if choice["logprobs"] is None:
        choice["logprobs"] = part["logprobs"]
        return
    for name, values in part["logprobs"].items():
        choice["logprobs"][name] += values


async def _prompts(body: CompletionRequest, service: Service) -> list[tuple[str, list[int]]]:
    """Each prompt as text and as token ids."""
    match body.prompt:
        case str(text):
            return [(text, await service.encode(text))]
        case [int(), *_] as ids:
            return [_of_ids(ids, service)]  # type: ignore[arg-type]
        case many:
            return [
                (one, await service.encode(one)) if isinstance(one, str) else _of_ids(one, service)  # type: ignore[arg-type]
                for one in many
            ]


def _of_ids(token_ids: list[int], service: Service) -> tuple[str, list[int]]:
    # The engine refuses those that it does not know; until then they have no text.
    known = [token for token in token_ids if 0 <= token < service.llm.tokenizer.vocab_size]
    return service.llm.tokenizer.decode(known, skip_special_tokens=False), token_ids
