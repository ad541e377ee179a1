"""Calls in text: found wherever the text is cut, and nothing else is taken for one."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_cli.serving.api.tool_calls import ParsedCall, ToolCallParser

CALL = '<tool_call>{"name": "f", "arguments": {"x": "<b>"}}</tool_call>'
TEXTS = [
    "",
    "plain",
    "a <tool",
    f"{CALL}",
    f"Well.\n{CALL}\n{CALL}\n",
    f"{CALL} then <tool_call>[1]</tool_call>",
]


def parse(pieces: list[str]) -> tuple[str, list[ParsedCall]]:
    parser = ToolCallParser()
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    assert all(parts)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, ParsedCall)]


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 200), max_size=8))
def test_where_the_text_is_cut_does_not_matter(text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    assert parse(pieces) == parse([text])


def test_text_and_calls_are_told_apart() -> None:
    text, calls = parse([f"Well.\n{CALL}\n{CALL}\n"])
    assert text == "Well."
    assert [call.name for call in calls] == ["f", "f"]
    assert json.loads(calls[0].arguments) == {"x": "<b>"}


@pytest.mark.parametrize(
    "inner",
    ["", "{", "[1]", '{"name": 3}', '{"name": "f", "arguments": "x"}', '{"arguments": {}}', "[" * 9999],
)
def test_what_is_no_call_stays_text(inner: str) -> None:
    whole = f"<tool_call>{inner}</tool_call> more"
    assert parse([whole]) == (whole, [])


def test_a_call_that_lacks_its_closing_tag_counts_if_it_is_whole() -> None:
    assert [call.name for call in parse([CALL.removesuffix("</tool_call>")])[1]] == ["f"]
    assert parse([CALL[:30]]) == (CALL[:30], [])
