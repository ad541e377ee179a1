"""From the messages and tools of a request to what a chat template takes."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from tessera_cli.errors import UsageError
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.serving.api.protocol import ChatMessage, Tool

# Rendering and tokenising this many characters takes about a millisecond.
_LARGE = 4096


async def encode_conversation(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None = None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Token ids of a conversation as the model's chat template writes it.

    Raises:
        UsageError: tools, or turns that speak of them, and the template does not write them; a turn that
            contradicts itself.
        DataError: the template refuses the messages.
        ModelError: the model has no chat template.
    """
    turns = [_turn(message, f"messages[{place}]") for place, message in enumerate(messages)]
    if tools is not None or any("tool_calls" in turn or turn["role"] == "tool" for turn in turns):
        _check_template(tokenizer.chat_template or "", "messages" if tools is None else "tools")
    definitions = None if tools is None else [tool.model_dump(exclude_none=True) for tool in tools]

    def encode() -> list[int]:
        text = tokenizer.render_chat(turns, add_generation_prompt=add_generation_prompt, tools=definitions)
        return tokenizer.encode(text, add_special_tokens=False)  # the template writes BOS itself

    size = sum(len(turn["content"]) for turn in turns)
    try:
        return await asyncio.to_thread(encode) if size > _LARGE else encode()
    except UsageError as error:
        error.param = "messages"
        raise


def _check_template(template: str, param: str) -> None:
    if "tools" not in template:
        raise UsageError("the model's chat template knows no tools", param=param)
    if "<tool_call>" not in template:
        raise UsageError(
            "the model's chat template calls tools in another form than <tool_call>", param=param
        )


def _turn(message: ChatMessage, place: str) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    is_call = message.tool_calls is not None
    if content is None and not is_call:
        raise UsageError(f"a message of role {message.role!r} has no content", param=f"{place}.content")
    if is_call and message.role != "assistant":
        raise UsageError(
            f"a message of role {message.role!r} has tool_calls",
            hint="only the assistant calls",
            param=f"{place}.tool_calls",
        )
    if (message.tool_call_id is not None) != (message.role == "tool"):
        raise UsageError(
            "tool_call_id belongs to messages of role 'tool', and to each of them",
            param=f"{place}.tool_call_id",
        )
    # What the API calls developer is the system of every template.
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": content or ""}
    if message.tool_calls is not None:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments, place),
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _arguments(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("the arguments of a tool call are not JSON", param=f"{place}.tool_calls") from None
