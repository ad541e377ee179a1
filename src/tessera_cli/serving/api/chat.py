"""`POST /v1/chat/completions`: the next turn of a conversation."""

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from tessera_cli.engine.sequence import FinishReason
from tessera_cli.errors import TesseraError, UsageError
from tessera_cli.serving.api import sse
from tessera_cli.serving.api.conversation import encode_conversation
from tessera_cli.serving.api.errors import named_as, tell
from tessera_cli.serving.api.json_route import JsonRoute
from tessera_cli.serving.api.protocol import ChatCompletionRequest, NamedTool
from tessera_cli.serving.api.service import Answering, Service, Serving
from tessera_cli.serving.api.tool_calls import ParsedCall, ToolCallParser
from tessera_cli.serving.api.tool_choice import check_tools, form_of_calls, offered_tools
from tessera_cli.serving.engine_events import Chunk
from tessera_cli.serving.outputs import CompletionOutput

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, service: Serving) -> Response:
    """Answer a conversation, `n` times; the answer may be as long as the context has room."""
    service.check_model(body.model)
    _check(body)
    tools = offered_tools(body)
    prompt = await encode_conversation(service.llm.tokenizer, body.messages, tools)
    with named_as(body.field_names):
        params = body.sampling_params(
            max_tokens=_first(body.max_completion_tokens, body.max_tokens, service.room(prompt)),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structured_output=form_of_calls(body) or body.response_form,
        )
        answering = await service.generate([prompt], params, body)
    answer = _ChatAnswer(
        service, answering, calls_tools=tools is not None, names_tool=isinstance(body.tool_choice, NamedTool)
    )
    if body.stream:
        return sse.stream(answer.events(body.includes_usage))
    return JSONResponse(await answer.whole())


def _check(body: ChatCompletionRequest) -> None:
    """Refuse what contradicts itself.

    Raises:
        UsageError: it does.
    """
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise UsageError("max_tokens and max_completion_tokens are not the same", param="max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise UsageError("top_logprobs needs logprobs to be true", param="top_logprobs")
    check_tools(body)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)


class _Message:
    """One choice as it grows: its text, and the calls in it if it may have any."""

    def __init__(self, index: int, *, calls_tools: bool, names_tool: bool) -> None:
        self.index = index
        self.has_begun = False
        self._names_tool = names_tool
        self._parser = ToolCallParser() if calls_tools else None
        self._num_calls = 0

    def deltas(self, text: str, *, is_last: bool, new_id: Any) -> list[dict[str, Any]]:
        """What `text` adds, as the deltas of a stream."""
        parts: list[str | ParsedCall] = [text] if text else []
        if self._parser is not None:
            parts = self._parser.feed(text) + (self._parser.finish() if is_last else [])
        return [
            {"content": p} if isinstance(p, str) else {"tool_calls": [self._call(p, new_id)]} for p in parts
        ]

    def finish_reason(self, output: CompletionOutput) -> str:
        """Why it ended, in OpenAI's words: a call that the request itself names ends with "stop"."""
        if self._num_calls and not self._names_tool and output.finish_reason is FinishReason.STOP:
            return "tool_calls"
        return str(output.finish_reason)

    def _call(self, call: ParsedCall, new_id: Any) -> dict[str, Any]:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": new_id("call"), "type": "function", "function": function}


class _ChatAnswer:
    """One answer on its way."""

    def __init__(
        self, service: Service, answering: Answering, *, calls_tools: bool, names_tool: bool
    ) -> None:
        self._service = service
        self._answering = answering
        self._messages = [
            _Message(index, calls_tools=calls_tools, names_tool=names_tool)
            for index in range(answering.num_choices)
        ]
        self._head = {
            "id": service.new_id("chatcmpl"),
            "object": "chat.completion",
            "created": service.created,
            "model": service.model,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = [self._choice(output) for output in await self._answering.outputs()]
        return self._head | {"choices": choices, "usage": self._answering.usage.as_body()}

    def _choice(self, output: CompletionOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        own = self._messages[output.index]
        for delta in own.deltas(output.text, is_last=True, new_id=self._service.new_id):
            if "content" in delta:
                message["content"] = (message["content"] or "") + delta["content"]
            else:
                calls = [{k: v for k, v in call.items() if k != "index"} for call in delta["tool_calls"]]
                message.setdefault("tool_calls", []).extend(calls)
        if "tool_calls" not in message:
            message["content"] = message["content"] or ""
        content = None if output.logprobs is None else [one.as_content() for one in output.logprobs]
        return {
            "index": output.index,
            "message": message,
            "logprobs": None if content is None else {"content": content, "refusal": None},
            "finish_reason": own.finish_reason(output),
            "stop_reason": output.stop_reason,
        }

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as a stream."""
        head = self._head | {"object": "chat.completion.chunk"} | ({"usage": None} if include_usage else {})
        try:
            async for chunks in self._answering:
                choices = [choice for index, chunk in chunks for choice in self._deltas(index, chunk)]
                if choices:
                    yield b"".join(sse.event(head | {"choices": [choice]}) for choice in choices)
        except TesseraError as error:
            yield sse.event(tell(error)) + sse.DONE
            return
        if include_usage:
            yield sse.event(head | {"choices": [], "usage": self._answering.usage.as_body()})
        yield sse.DONE

    def _deltas(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        message = self._messages[index]
        deltas: list[dict[str, Any]] = []
        if not message.has_begun:
            message.has_begun = True
            deltas.append({"role": "assistant", "content": ""})
        output = chunk.output
        deltas += message.deltas(chunk.text, is_last=output is not None, new_id=self._service.new_id)
        if not deltas and (output is not None or chunk.logprobs):
            deltas.append({})
        choices: list[dict[str, Any]] = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if choices and chunk.logprobs:
            content = [one.as_content() for one in chunk.logprobs]
            choices[-1]["logprobs"] = {"content": content, "refusal": None}
        if output is not None:
            choices[-1] |= {
                "finish_reason": message.finish_reason(output),
                "stop_reason": output.stop_reason,
            }
        return choices
