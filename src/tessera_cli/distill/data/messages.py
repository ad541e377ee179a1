"""Conversations as data files hold them, checked: what no template would show is an error."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tessera_cli.distill.data.row_files import unique_keys
from tessera_cli.errors import DataError
from tessera_cli.models.tokenizer import Tokenizer

Message = dict[str, Any]
Tools = list[Mapping[str, Any]] | None

# What a message may have beside role and content, by its role.
_ROLES: dict[str, tuple[str, ...]] = {
    "system": (),
    "developer": (),
    "user": (),
    "assistant": ("tool_calls",),
    "tool": ("name", "tool_call_id"),
}


def conversation(value: Any, where: str) -> list[Message]:
    """The messages of `value`; `where` is the column that errors name.

    Raises:
        DataError: it is no list of messages, or one has a role or a key that means nothing.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"`{where}` is {describe(value)}, expected a list of messages")
    return [_message(item, f"{where}[{index}]") for index, item in enumerate(value)]


def tools_of(value: Any) -> Tools:
    """Function definitions: a list of objects, or such a list as JSON text; None where there are none.

    Raises:
        DataError: they are something else.
    """
    if value is None or value == []:
        return None
    if isinstance(value, str):  # tables cannot hold objects of different keys in one column
        try:
            value = json.loads(value, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise DataError(f"`tools` is text that is not JSON: {error}") from error
        if value is None:  # how JSON spells a row without any
            return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f"`tools` is {describe(value)}, expected a list of function definitions")
    return value or None


def check_template(text: str, messages: Sequence[Message], tools: Tools, tokenizer: Tokenizer) -> None:
    """See that the template wrote tools and tool calls into `text`, its rendering of `messages`.

    Raises:
        DataError: it passes over them, so that nothing would be learnt of them, or they hold what is no text.
    """
    # What messages say was looked at before.
    _check_characters(text, "a tool or a tool call")
    if tools is not None and any(
        text == tokenizer.render_chat(messages, add_generation_prompt=prompt) for prompt in (False, True)
    ):
        raise DataError(
            "the chat template has no place for `tools`", hint="use another template, or remove them"
        )
    for index, message in enumerate(messages):
        if "tool_calls" not in message:
            continue
        silent = {key: value for key, value in message.items() if key != "tool_calls"}
        shown, without = (
            tokenizer.render_chat([*messages[:index], last], add_generation_prompt=False, tools=tools)
            for last in (message, silent)
        )
        if shown == without:
            raise DataError(
                f"the chat template has no place for the tool calls of message {index + 1}",
                hint="use another template, or write them into `content`",
            )


def describe(value: Any) -> str:
    """A value in an error."""
    return "missing" if value is None else "empty" if value in ("", []) else repr(value)[:40]


def text_of(value: Any, where: str) -> str:
    """`value`, which is text that a tokenizer takes.

    Raises:
        DataError: it is not.
    """
    if not isinstance(value, str):
        raise DataError(f"`{where}` is {describe(value)}, expected text")
    _check_characters(value, f"`{where}`")
    return value


def _check_characters(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # JSON can spell one with \u; no tokenizer takes it.
        raise DataError(f"{what} has half of a surrogate pair at character {error.start + 1}") from error


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"`{where}` is {describe(item)}, expected a role and a content")
    # A key without a value is none: Parquet gives every message the keys that any of them has.
    given = {key: value for key, value in item.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise DataError(f"`{where}.role` is {describe(item.get('role'))}, expected {', '.join(_ROLES)}")
    known = ("role", "content", *_ROLES[role])
    unknown = sorted(given.keys() - set(known))
    if unknown:
        raise DataError(
            f"`{where}` has the key {unknown[0]!r}, a message of role {role} has only {', '.join(known)}"
        )
    calls = given.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise DataError(f"`{where}.tool_calls` is {describe(calls)}, expected a list of calls")
    # Who only calls tools says nothing.
    content = text_of("" if calls and "content" not in given else given.get("content"), f"{where}.content")
    others = {key: text_of(given[key], f"{where}.{key}") for key in ("name", "tool_call_id") if key in given}
    return {"role": role, "content": content, **({"tool_calls": calls} if calls else {}), **others}
