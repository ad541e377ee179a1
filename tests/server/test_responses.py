"""The plain-text part of the responses interface, through OpenAI's own client."""

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


@pytest.mark.parametrize("field", ["previous_response_id", "tools", "background", "reasoning"])
def test_what_cannot_be_done_is_a_400_that_names_it(client: openai.OpenAI, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        client.responses.create(**ASK, extra_body={field: "x"})
