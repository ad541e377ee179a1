"""`POST /v1/responses`: the plain-text part of OpenAI's newer interface; nothing is stored."""

from collections.abc import AsyncIterator
from itertools import count
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from tessera_cli.engine.sequence import FinishReason
from tessera_cli.errors import TesseraError
from tessera_cli.serving.api import sse
from tessera_cli.serving.api.conversation import encode_conversation
from tessera_cli.serving.api.errors import tell
from tessera_cli.serving.api.json_route import JsonRoute
from tessera_cli.serving.api.protocol import Body, ChatMessage, SamplingFields, TextPart
from tessera_cli.serving.api.service import Answering, Service, Serving
from tessera_cli.serving.outputs import CompletionOutput

router = APIRouter(route_class=JsonRoute)


class InputPart(Body):
    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputPart]


class ResponsesRequest(Body):
    """What of `POST /v1/responses` is served: text in, text out."""

    model: str
    input: str | Annotated[list[InputMessage], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: Literal[False] | None = None
    user: str | None = None

    def messages(self) -> list[ChatMessage]:
        """The same as the messages of a chat."""
        messages = []
        if self.instructions is not None:
            messages.append(ChatMessage(role="system", content=self.instructions))
        if isinstance(self.input, str):
            return [*messages, ChatMessage(role="user", content=self.input)]
        for one in self.input:
            content: Any = one.content
            if isinstance(content, list):
                content = [TextPart(type="text", text=part.text) for part in content]
            messages.append(ChatMessage(role=one.role, content=content))
        return messages

    def sampling_fields(self) -> SamplingFields:
        """What it says of sampling."""
        return SamplingFields(
            model=self.model, temperature=self.temperature, top_p=self.top_p, user=self.user
        )


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, service: Serving) -> Response:
    """Answer a text or a conversation."""
    service.check_model(body.model)
    prompt = await encode_conversation(service.llm.tokenizer, body.messages())
    fields = body.sampling_fields()
    room = service.room(prompt) if body.max_output_tokens is None else body.max_output_tokens
    answering = await service.generate([prompt], fields.sampling_params(max_tokens=room), fields)
    answer = _ResponseAnswer(body, service, answering)
    if body.stream:
        return sse.stream(answer.events())
    (output,) = await answering.outputs()
    return JSONResponse(answer.whole(output))


class _ResponseAnswer:
    """One answer on its way."""

    def __init__(self, body: ResponsesRequest, service: Service, answering: Answering) -> None:
        self._answering = answering
        self._item_id = service.new_id("msg")
        self._numbers = count()
        self._base: dict[str, Any] = {
            "id": service.new_id("resp"),
            "object": "response",
            "created_at": service.created,
            "model": service.model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "store": False,
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "metadata": {},
            "error": None,
            "incomplete_details": None,
        }

    def whole(self, output: CompletionOutput) -> dict[str, Any]:
        """The answer in one piece."""
        is_cut = output.finish_reason is FinishReason.LENGTH
        usage = self._answering.usage
        return self._base | {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(output.text, "incomplete" if is_cut else "completed")],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as OpenAI's named events."""
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        begun = self._base | {"status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        item = self._item("", "in_progress") | {"content": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **place, part=_part(""))
        output: CompletionOutput | None = None
        try:
            async for chunks in self._answering:
                text = "".join(chunk.text for _, chunk in chunks)
                if text:
                    yield self._event("response.output_text.delta", **place, delta=text, logprobs=[])
                output = chunks[-1][1].output
        except TesseraError as error:
            message = tell(error)["error"]["message"]
            failed = begun | {"status": "failed", "error": {"code": "server_error", "message": message}}
            yield self._event("response.failed", response=failed)
            return
        assert output is not None, "a generation ends with its output"
        whole = self.whole(output)
        yield self._event("response.output_text.done", **place, text=output.text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(output.text))
        yield self._event("response.output_item.done", output_index=0, item=whole["output"][0])
        yield self._event(f"response.{whole['status']}", response=whole)

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse.event({"type": kind, "sequence_number": next(self._numbers)} | fields, name=kind)

    def _item(self, text: str, status: str) -> dict[str, Any]:
        head = {"type": "message", "id": self._item_id, "role": "assistant", "status": status}
        return head | {"content": [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
