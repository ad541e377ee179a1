"""`POST /v1/responses`: the plain-text part of OpenAI's newer interface; nothing is stored."""

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from tessera_cli.engine.sequence import FinishReason
from tessera_cli.errors import TesseraError
from tessera_cli.serving.api import sse
from tessera_cli.serving.api.conversation import encode_conversation
from tessera_cli.serving.api.errors import named_as, tell
from tessera_cli.serving.api.json_route import JsonRoute
from tessera_cli.serving.api.responses_protocol import ResponsesRequest
from tessera_cli.serving.api.service import Answering, Service, Serving
from tessera_cli.serving.outputs import CompletionOutput

router = APIRouter(route_class=JsonRoute)

_PLAIN = {"type": "text"}


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, service: Serving) -> Response:
    """Answer a text or a conversation."""
    service.check_model(body.model)
    with named_as(body.field_names):
        prompt = await encode_conversation(service.llm.tokenizer, body.messages())
        room = service.room(prompt) if body.max_output_tokens is None else body.max_output_tokens
        answering = await service.generate([prompt], body.sampling_params(room), body)
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
            "text": {"format": {"type": "text"}}
            if body.text is None
            else body.text.model_dump(by_alias=True),
            "tools": [],
            "tool_choice": "none",
            "parallel_tool_calls": False,
            "metadata": body.metadata or {},
            "background": False,
            "previous_response_id": None,
            "truncation": "disabled",
            "user": body.user,
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
