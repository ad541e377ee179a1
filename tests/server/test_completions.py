"""Completions as OpenAI's own client sees them."""

from typing import Any

import openai
import pytest

from tests.server.running import MODEL, Running

PROMPT = "The quick brown fox"
GREEDY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0.0, "max_tokens": 12}
IGNORE_EOS = {"ignore_eos": True}


def test_a_completion_has_text_reason_and_exact_usage(server: Running, client: openai.OpenAI) -> None:
    answer = client.completions.create(**GREEDY, extra_body=IGNORE_EOS)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(server.llm.tokenizer.encode(PROMPT))
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    server.wait_until_idle()


@pytest.mark.parametrize("n", [1, 3])
def test_the_stream_adds_up_to_the_whole(server: Running, client: openai.OpenAI, n: int) -> None:
    fields: dict[str, Any] = GREEDY | {"temperature": 1.5, "seed": 5, "n": n, "logprobs": 2, "max_tokens": 40}
    fields["prompt"] = [PROMPT, "日本語", "A small student"]
    fields["stop"] = [" t", "an"]
    whole = client.completions.create(**fields)
    texts, reasons = [""] * 3 * n, [None] * 3 * n
    logprobs: list[list[float]] = [[] for _ in texts]
    usage = None
    stream = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert chunk.usage is None
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs is not None:
                logprobs[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices if choice.logprobs]
    assert not any(stop in text for stop in fields["stop"] for text in texts)
    assert "stop" in reasons
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == sum(map(len, logprobs))
    server.wait_until_idle()


def test_usage_comes_only_where_it_is_asked_for(client: openai.OpenAI) -> None:
    chunks = list(client.completions.create(**GREEDY, stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_echo_puts_the_prompt_before_and_scores_it(server: Running, client: openai.OpenAI) -> None:
    plain = client.completions.create(**GREEDY)
    answer = client.completions.create(**GREEDY, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == PROMPT + plain.choices[0].text
    logprobs = choice.logprobs
    assert logprobs is not None
    prompt = server.llm.tokenizer.encode(PROMPT)
    assert len(logprobs.tokens or ()) == len(prompt) + 12
    assert "".join(logprobs.tokens or ())[: len(PROMPT)] == PROMPT
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert choice.text[logprobs.text_offset[1] :].startswith(logprobs.tokens[1])  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_alone_makes_no_token(client: openai.OpenAI, stream: bool) -> None:
    fields = GREEDY | {"max_tokens": 0, "echo": True, "logprobs": 0}
    answer = client.completions.create(**fields, stream=stream)
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == PROMPT
    assert choices[-1].finish_reason == "length"
    if not stream:
        assert answer.usage.completion_tokens == 0


def test_a_prompt_of_token_ids_is_the_same_as_its_text(server: Running, client: openai.OpenAI) -> None:
    by_text = client.completions.create(**GREEDY)
    ids = server.llm.tokenizer.encode(PROMPT)
    for prompt in (ids, [ids]):
        by_ids = client.completions.create(**GREEDY | {"prompt": prompt}, echo=True)
        assert by_ids.choices[0].text == PROMPT + by_text.choices[0].text


def test_over_http_the_default_temperature_is_one(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": PROMPT, "seed": 7, "max_tokens": 20}
    default = client.completions.create(**fields)  # type: ignore[call-overload]
    assert default.choices[0].text == client.completions.create(**fields, temperature=1.0).choices[0].text  # type: ignore[call-overload]
    assert default.choices[0].text != client.completions.create(**fields, temperature=0.0).choices[0].text  # type: ignore[call-overload]


def test_logit_bias_and_stop_token_ids_reach_the_engine(client: openai.OpenAI) -> None:
    biased = client.completions.create(**GREEDY, logit_bias={"70": 100})
    assert len(set(biased.choices[0].text)) == 1
    stopped = client.completions.create(**GREEDY, logit_bias={"70": 100}, extra_body={"stop_token_ids": [70]})
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == ""
    assert stopped.choices[0].stop_reason == 70
    assert stopped.usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 100_000}, "n"),
        ({"n": 300}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
        ({"prompt": [99_999]}, "prompt"),
        ({"prompt": ["x", 3]}, "prompt[1]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop_token_ids": [99_999]}, "stop_token_ids"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"priority": 3}, "priority"),
        ({"no_such": 3}, "no_such"),
    ],
)
def test_what_cannot_be_done_is_a_400_that_names_the_field(
    server: Running, fields: dict[str, Any], param: str
) -> None:
    answer = server.http.post("/v1/completions", json=GREEDY | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    server.wait_until_idle()


def test_another_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.completions.create(**GREEDY | {"model": "gpt-9"})


def test_a_salt_and_cached_tokens_are_told(client: openai.OpenAI) -> None:
    def cached(salt: str) -> int:
        fields = GREEDY | {"prompt": "block " * 30, "max_tokens": 2}
        usage = client.completions.create(**fields, extra_body={"cache_salt": salt} | IGNORE_EOS).usage
        return usage.prompt_tokens_details.cached_tokens

    assert [cached("a"), cached("b")] == [0, 0]
    assert cached("a") >= 16
