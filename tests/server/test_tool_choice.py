"""The forms of answers with tools, by what a grammar takes and refuses of a text."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from tessera_cli.serving.api.protocol import ChatCompletionRequest
from tessera_cli.serving.api.tool_choice import form_of_calls

SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "$defs": {"city": {"enum": ["Ulm", "Rom"]}},
}
WEATHER = {"name": "weather", "parameters": SCHEMA}


def call(city: str = "Ulm", name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps({"city": city})}}}\n</tool_call>'


def now() -> str:
    return '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def takes(model_dir: Path, text: str, *, strict: bool = True, **fields: Any) -> bool:
    """Whether an answer may be `text`, from end to end."""
    functions = [WEATHER | {"strict": strict}, {"name": "now"}]
    tools = [{"type": "function", "function": function} for function in functions]
    messages = [{"role": "user", "content": "?"}]
    body = ChatCompletionRequest.model_validate(
        {"model": "m", "messages": messages, "tools": tools} | fields, strict=True
    )
    form = form_of_calls(body)
    assert form is not None
    assert form.grammar is not None
    tokenizer = LLTokenizer(str(model_dir / "tokenizer.json"))
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(form.grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    if matcher.validate_tokens(ids) < len(ids):
        return False
    matcher.consume_tokens(ids)
    return matcher.is_accepting()


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "text", "is_taken"),
    [
        (NAMED, call(), True),
        (NAMED, call("Bonn"), False),
        (NAMED, now(), False),
        (NAMED, f"{call()}\n{call()}", False),
        (NAMED, "Well.", False),
        ("required", now(), True),
        ("required", f"{call()}\n{now()}", True),
        ("required", call("Bonn"), False),
        ("required", "", False),
        ("auto", "Plain <b> text.", True),
        ("auto", f"Well.\n{call()}\n{now()} and more", True),
        ("auto", f"Well.\n{call('Bonn')}", False),
        ("auto", f"{call()} <tool_call>", False),
    ],
)
def test_a_strict_answer_has_the_calls_that_the_choice_allows(
    tiny_model_dir: Path, choice: Any, text: str, is_taken: bool
) -> None:
    assert takes(tiny_model_dir, text, tool_choice=choice) == is_taken


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_without_parallel_calls_there_is_one(tiny_model_dir: Path, choice: str) -> None:
    fields: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False}
    assert takes(tiny_model_dir, call(), **fields)
    assert not takes(tiny_model_dir, f"{call()}\n{call()}", **fields)


def test_a_free_call_of_a_tool_that_is_not_strict_may_have_any_arguments(tiny_model_dir: Path) -> None:
    assert takes(tiny_model_dir, call("Bonn"), strict=False, parallel_tool_calls=False)
    assert not takes(tiny_model_dir, call(name="other"), strict=False, parallel_tool_calls=False)


def test_where_nothing_is_promised_calls_are_the_models_own() -> None:
    body = ChatCompletionRequest.model_validate(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "?"}],
            "tools": [{"type": "function", "function": WEATHER}],
        }
    )
    assert form_of_calls(body) is None
