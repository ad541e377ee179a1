"""Chats with tools: what the model is told, which calls are seen, and which are made to come."""

import json
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import openai
import pytest

from tests.server.running import MODEL, Running, running

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "How are you?"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tool_server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The tiny model with a template that writes tools and their calls."""
    path = copytree(tiny_model_dir, tmp_path_factory.mktemp("tools") / "model")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }}"
        "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
        "{% endfor %}\n{% endfor %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    with running(path, engine_options={"max_model_len": 512}) as server:
        yield server


def script(server: Running, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the model say `text`, by a bias of which no request knows."""
    from tessera_cli.engine import model_runner

    token_ids = [*server.llm.tokenizer.encode(text), 2]

    def sample(logits: Any, rows: Any, **_: Any) -> list[list[int]]:
        return [[token_ids[len(row.token_ids) - row.num_prompt_tokens]] for row in rows]

    monkeypatch.setattr(model_runner, "sample", sample)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_is_told_as_one(
    tool_server: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    said = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    script(tool_server, monkeypatch, said)
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="x", max_retries=0) as client:
        answer = client.chat.completions.create(**ASK, tools=[TOOL], stream=stream)
        if stream:
            choices = [choice for chunk in answer for choice in chunk.choices]
            content = "".join(choice.delta.content or "" for choice in choices)
            calls = [call for choice in choices for call in choice.delta.tool_calls or []]
            assert [call.index for call in calls] == [0]
            reason = choices[-1].finish_reason
        else:
            content, calls = answer.choices[0].message.content, answer.choices[0].message.tool_calls
            reason = answer.choices[0].finish_reason
    assert content == "Let me see."
    (call,) = calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Ulm"}
    assert call.id
    assert reason == "tool_calls"


def test_the_template_sees_tools_calls_and_results(tool_server: Running) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    tokens = tool_server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = tool_server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>' in text
    assert "tool: sunny" in text


def test_a_broken_call_stays_text(tool_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "<tool_call>{broken</tool_call> and more"
    script(tool_server, monkeypatch, said)
    answer = tool_server.http.post("/v1/chat/completions", json=ASK | {"tools": [TOOL]}).json()
    assert answer["choices"][0]["message"]["content"] == said
    assert answer["choices"][0]["finish_reason"] == "stop"


WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Ulm", "Rom"]}},
    },
}
FORCED: dict[str, Any] = ASK | {"temperature": 2.0, "max_tokens": 120}


def calls_of(answer: Any, stream: bool) -> tuple[str, list[Any], str]:
    """The text, the calls and the finish reason of an answer with one choice."""
    if not stream:
        (choice,) = answer.choices
        return choice.message.content or "", choice.message.tool_calls or [], choice.finish_reason
    choices = [choice for chunk in answer for choice in chunk.choices]
    calls = [call for choice in choices for call in choice.delta.tool_calls or []]
    return "".join(choice.delta.content or "" for choice in choices), calls, choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called_with_arguments_of_its_schema(tool_server: Running, stream: bool) -> None:
    tools: Any = [TOOL | {"function": {"name": "other"}}, TOOL | {"function": WEATHER | {"strict": True}}]
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="x", max_retries=0) as client:
        for seed in range(4):
            answer = client.chat.completions.create(
                **FORCED, seed=seed, tools=tools, tool_choice=choice, stream=stream
            )
            text, (call,), reason = calls_of(answer, stream)
            assert (text, call.function.name, reason) == ("", "weather", "stop")
            arguments = json.loads(call.function.arguments)
            assert arguments["city"] in ("Ulm", "Rom")
            assert arguments["days"] <= 9


@pytest.mark.parametrize("stream", [False, True])
def test_where_a_call_is_required_there_is_one(tool_server: Running, stream: bool) -> None:
    tools: Any = [TOOL | {"function": {"name": "now"}}, TOOL | {"function": WEATHER}]
    fields = FORCED | {"tools": tools, "tool_choice": "required", "stream": stream}
    called = set()
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="x", max_retries=0) as client:
        for seed in range(8):
            answer = client.chat.completions.create(**fields, parallel_tool_calls=False, seed=seed)
            text, (call,), reason = calls_of(answer, stream)
            assert (text, reason) == ("", "tool_calls")
            if call.function.name == "now":
                assert json.loads(call.function.arguments) == {}
            called.add(call.function.name)
    assert called == {"now", "weather"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "always", "tools": [TOOL]}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "no"}}, "tools": [TOOL]},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "response_format"),
        (
            {
                "tools": [TOOL | {"function": {"name": "x", "parameters": {"type": 3}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_a_choice_of_tools_that_cannot_be_kept_to_is_refused(
    tool_server: Running, fields: dict[str, Any], param: str
) -> None:
    answer = tool_server.http.post("/v1/chat/completions", json=ASK | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
