"""Chats as OpenAI's own client sees them: streams, forms, tools and refusals."""

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.server.running import MODEL, Running

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "How are you?"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
BAD_SCHEMA = {"name": "x", "schema": {"type": 3}}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["fox", "dog"]}, "count": {"type": "integer", "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


def test_an_answer_has_a_role_text_and_usage(server: Running, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASK, max_completion_tokens=9, temperature=0)
    message = answer.choices[0].message
    assert message.role == "assistant"
    assert message.content
    assert message.tool_calls is None
    rendered = "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    prompt = server.llm.tokenizer.encode(rendered, add_special_tokens=False)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    raw = client.completions.create(model=MODEL, prompt=prompt, max_tokens=9, temperature=0)
    assert raw.choices[0].text == message.content


@pytest.mark.parametrize("n", [1, 3])
def test_the_stream_adds_up_to_the_whole(server: Running, client: openai.OpenAI, n: int) -> None:
    fields = ASK | {"seed": 3, "n": n, "temperature": 1.8, "max_tokens": 30, "logprobs": True}
    fields |= {"top_logprobs": 1, "stop": "e"}
    whole = client.chat.completions.create(**fields)
    texts, reasons, roles = [""] * n, [""] * n, [0] * n
    tokens: list[list[Any]] = [[] for _ in range(n)]
    usages = []
    for chunk in client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            reasons[choice.index] += choice.finish_reason or ""
            tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.content for choice in whole.choices if choice.logprobs]
    assert roles == [1] * n
    assert [usage.completion_tokens for usage in usages] == [whole.usage.completion_tokens]
    assert not any("e" in text for text in texts)


def test_many_at_once_through_the_async_client(server: Running) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            fields = ASK | {"max_tokens": 6, "temperature": 1.0}

            async def one(seed: int) -> str | None:
                if seed % 2:
                    return (
                        (await client.chat.completions.create(**fields, seed=seed)).choices[0].message.content
                    )
                stream = await client.chat.completions.create(**fields, seed=seed, stream=True)
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            alone = [await one(seed) for seed in range(4)]
            together = await asyncio.gather(*(one(seed) for seed in range(24)))
            assert together[:4] == alone
            return list(together)

    assert len(set(asyncio.run(ask()))) > 12
    server.wait_until_idle()


def test_an_answer_keeps_to_its_json_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "animals", "schema": SCHEMA, "strict": True}}
    fields = ASK | {"response_format": form, "temperature": 2.0}
    for seed in range(3):
        answer = client.chat.completions.create(**fields, seed=seed, max_tokens=60)
        value = json.loads(answer.choices[0].message.content or "")
        assert value["kind"] in ("fox", "dog")
        assert isinstance(value["count"], int)
        assert answer.choices[0].finish_reason == "stop"


def test_an_answer_can_be_any_json_object(client: openai.OpenAI) -> None:
    fields = ASK | {"response_format": {"type": "json_object"}, "seed": 1, "temperature": 2.0}
    answer = client.chat.completions.create(**fields, max_tokens=5)
    assert (answer.choices[0].message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {}}, "audio"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"metadata": {"run": 3}}, "metadata.run"),
        ({"model": 3}, "model"),
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 300}]}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": BAD_SCHEMA}}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e9}, "temperature"),
        ({"stop": [""]}, "stop"),
        ({"stop": [3]}, "stop[0]"),
        ({"seed": -1}, "seed"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_the_field(
    server: Running, fields: dict[str, Any], param: str
) -> None:
    answer = server.http.post("/v1/chat/completions", json=ASK | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    server.wait_until_idle()


def test_what_clients_send_unasked_changes_nothing(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**ASK, max_tokens=9, temperature=0)
    answer = client.chat.completions.create(
        **ASK,
        max_tokens=9,
        temperature=0,
        store=False,
        metadata={"run": "3"},
        service_tier="auto",
        user="ada",
        safety_identifier="ada",
        prompt_cache_key="k",
        modalities=["text"],
    )
    assert answer.choices == plain.choices
