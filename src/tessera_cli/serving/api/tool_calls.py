"""Calls of tools in a model's text, as Hermes and Qwen write them: JSON between two tags."""

import json
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ParsedCall:
    """A call of the function `name`; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class ToolCallParser:
    """Splits text that comes in pieces into plain text and calls.

    Text that may turn out to belong to a call is held back. What stands between the tags and is no call is
    plain text, tags included, so nothing that the model said is lost but blanks around calls.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._has_called = False

    def feed(self, piece: str) -> list[str | ParsedCall]:
        """What is certain with `piece`, in order."""
        self._held += piece
        parts: list[str | ParsedCall] = []
        while True:
            tag = CLOSE if self._is_inside else OPEN
            before, found, after = self._held.partition(tag)
            if not found:
                break
            if self._is_inside:
                parts.append(self._call(before) or OPEN + before + CLOSE)
            elif before.strip():
                parts.append(before.rstrip())
            self._held, self._is_inside = after, not self._is_inside
        if not self._is_inside:
            certain = self._held[: len(self._held) - _overlap(self._held)].rstrip()
            self._held = self._held[len(certain) :]
            parts.append(certain)
        return [part for part in parts if part]

    def finish(self) -> list[str | ParsedCall]:
        """What was held back; a call without its closing tag counts if it is whole."""
        held, self._held = self._held, ""
        if self._is_inside:
            return [self._call(held) or OPEN + held]
        return [held] if held and not (self._has_called and held.isspace()) else []

    def _call(self, text: str) -> ParsedCall | None:
        call = _parse(text)
        self._has_called = self._has_called or call is not None
        return call


def _parse(text: str) -> ParsedCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ParsedCall(call["name"], json.dumps(arguments, ensure_ascii=False))


def _overlap(text: str) -> int:
    """How many characters at the end of `text` may begin the opening tag."""
    return next((n for n in range(min(len(text), len(OPEN) - 1), 0, -1) if text.endswith(OPEN[:n])), 0)
