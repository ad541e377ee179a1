"""The chat of the page: what is asked, what is shown, and what is sent."""

import time
from typing import Any

import pytest

from tests.server.browser.actions import MARKS, Open, ask, expect
from tests.server.toy_server import ToyServer

pytestmark = MARKS


def test_an_answer_comes_as_text_whatever_is_in_it(toy: ToyServer, open_page: Open) -> None:
    page = open_page()
    text = "<img src=x onerror=alert(1)> <b>bold</b> & café 日本"
    ask(page, text)
    expect(page, ".assistant .note").to_contain_text("7 tokens · first after")
    assert page.locator(".body").all_text_contents() == [text, text]
    assert page.locator(".log img, .log b").count() == 0


def test_the_conversation_goes_on(toy: ToyServer, open_page: Open) -> None:
    page = open_page()
    for text in ("one", "two"):
        ask(page, text)
        expect(page, f".assistant:has-text('{text}') .note").to_contain_text("1 token")
    roles = [(message["role"], message["content"]) for message in toy.bodies[-1]["messages"]]
    assert roles == [("user", "one"), ("assistant", "one"), ("user", "two")]
    page.click("#new-chat")
    assert page.locator(".message").count() == 0
    ask(page, "three")
    expect(page, ".assistant .note").to_contain_text("1 token")
    assert len(toy.bodies[-1]["messages"]) == 1


def test_what_is_set_is_sent_and_what_is_not_is_left_out(toy: ToyServer, open_page: Open) -> None:
    page = open_page()
    ask(page, "plain")
    expect(page, ".assistant .note").to_contain_text("token")
    assert toy.bodies[-1] == {
        "model": "toy-student",
        "messages": [{"role": "user", "content": "plain"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 256,
    }
    page.click("summary")
    fields = {"system": "Be brief.", "temperature": "0", "top-p": "0.9", "max-tokens": "7", "seed": "-3"}
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    ask(page, "set")
    expect(page, ".assistant:has-text('set') .note").to_contain_text("token")
    body = toy.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": -3,
    }


def test_an_impossible_setting_is_shown_and_not_sent(toy: ToyServer, open_page: Open) -> None:
    page = open_page()
    page.click("summary")
    page.fill("#temperature", "-1")
    page.click("summary")
    ask(page, "hello")
    expect(page, "#temperature").to_be_focused()
    assert toy.bodies == []
    assert page.input_value("#prompt") == "hello"


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_what_has_come_and_ends_the_request(toy: ToyServer, open_page: Open, how: str) -> None:
    toy.pause = 0.05
    page = open_page()
    ask(page, " ".join(f"w{i}" for i in range(100)))
    expect(page, ".assistant .body").to_contain_text("w2")
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    expect(page, ".assistant .note").to_have_text("Stopped.")
    expect(page, "#send").to_be_visible()
    deadline = time.monotonic() + 5
    while toy.llm.scheduler.has_unfinished():
        assert time.monotonic() < deadline, "the server goes on"
        time.sleep(0.01)
    told = page.locator(".assistant .body").text_content()
    ask(page, "again")
    expect(page, ".assistant:has-text('again') .note").to_contain_text("1 token")
    assert toy.bodies[-1]["messages"][1] == {"role": "assistant", "content": told}


def test_a_refusal_is_told_and_the_message_given_back(toy: ToyServer, open_page: Open) -> None:
    page = open_page(allowed="400")
    toy.refusal = "the prompt is too long <i>"
    ask(page, "hello")
    expect(page, ".assistant .note").to_have_text("the prompt is too long <i>")
    assert page.input_value("#prompt") == "hello"
    toy.refusal = None
    page.press("#prompt", "Enter")
    expect(page, ".assistant:not(.failed) .note").to_contain_text("1 token")
    assert len(toy.bodies[-1]["messages"]) == 1


def test_a_key_that_the_server_asks_for_opens_both_halves(toy: ToyServer, chromium: Any) -> None:
    toy.required_key = "secret"
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(toy.url)
        expect(page, "#connection").to_contain_text("API key")
        ask(page, "hello")
        expect(page, ".assistant .note").to_contain_text("API key")
        page.fill("#api-key", "secret")  # the settings have opened
        page.press("#api-key", "Tab")
        expect(page, "#connection").to_have_text("live")
        expect(page, "#model").to_have_text("toy-student")
        page.press("#prompt", "Enter")
        expect(page, ".assistant:not(.failed) .note").to_contain_text("1 token")
    assert toy.keys[-1] == "Bearer secret"
