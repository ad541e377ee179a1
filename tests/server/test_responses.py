"""The plain-text part of the responses interface, through OpenAI's own client."""

import json
from typing import Any

import openai
import pytest

from tests.server.running import MODEL, Running

ASK: dict[str, Any] = {"model": MODEL, "input": "How are you?", "temperature": 0, "max_output_tokens": 9}


def test_a_response_is_what_the_chat_says(client: openai.OpenAI) -> None:
    response = client.responses.create(**ASK, instructions="Be brief.")
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How are you?"},
    ]
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=9, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == 9


def test_the_stream_has_every_event_in_order_and_adds_up(server: Running, client: openai.OpenAI) -> None:
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    assert events[-1].response.output_text == whole.output_text  # type: ignore[union-attr]
    server.wait_until_idle()


def test_a_conversation_is_taken_in_parts(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "How are you?"}]}]
    assert (
        client.responses.create(**ASK | {"input": parts}).output_text
        == client.responses.create(**ASK).output_text
    )


def test_an_answer_can_be_sent_back_as_it_is(client: openai.OpenAI) -> None:
    first = client.responses.create(**ASK)
    asked: Any = {"role": "user", "content": "How are you?"}
    turns: Any = [asked, *first.output, {"role": "user", "content": "?"}]
    messages: Any = [
        asked,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "?"},
    ]
    second = client.responses.create(**ASK | {"input": turns})
    chat = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=9, temperature=0)
    assert second.output_text == chat.choices[0].message.content


SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}
FORM: Any = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}


def test_a_text_format_is_kept_to(client: openai.OpenAI) -> None:
    answer = client.responses.create(**ASK | {"max_output_tokens": 40, "temperature": 2.0}, text=FORM)
    assert json.loads(answer.output_text)["n"] in (1, 2)
    assert answer.status == "completed"


def test_the_clients_stream_helper_reads_the_events(client: openai.OpenAI) -> None:
    with client.responses.stream(**ASK | {"max_output_tokens": 40}, text=FORM) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == deltas


def test_what_clients_send_unasked_changes_nothing(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        **ASK,
        store=False,
        metadata={"run": "3"},
        tools=[],
        tool_choice="auto",
        parallel_tool_calls=True,
        include=[],
        truncation="disabled",
        service_tier="auto",
        text={"format": {"type": "text"}},
    )
    assert answer.output_text == client.responses.create(**ASK).output_text
    assert answer.metadata == {"run": "3"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"reasoning": {}}, "reasoning"),
        ({"store": True}, "store"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"input": "word " * 300}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, "text"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_the_field(
    server: Running, fields: dict[str, Any], param: str
) -> None:
    answer = server.http.post("/v1/responses", json=ASK | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
