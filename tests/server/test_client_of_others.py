"""`bench` and `generate` with --base-url: what a foreign server answers, well or badly, and what is told."""

import json

import pytest
from fastapi import FastAPI

from tessera_cli.errors import ExitCode
from tests.server.scripted import DONE, GOOD, USAGE, chunk, event, scripted, serving

ONE_BY_ONE = ["--concurrency", "1", "--num-warmups", "0", "--output-len", "3", "--json"]


def test_tokens_are_those_of_usage_and_gaps_those_between_chunks(tessera):
    with scripted(GOOD, GOOD) as url:
        code, out, err = tessera("bench", *ONE_BY_ONE, "--num-prompts", "2", "--base-url", url)
    figures = json.loads(out)
    assert code == ExitCode.SUCCESS, err
    # Three tokens came in two chunks of text: one gap, and the server's count.
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (8, 6)
    assert 0 <= figures["mean_itl_ms"] <= figures["mean_e2el_ms"] - figures["mean_ttft_ms"]
    assert figures["mean_tpot_ms"] == pytest.approx((figures["mean_e2el_ms"] - figures["mean_ttft_ms"]) / 2)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (["refuse"], "HTTP 429: too many"),
        ([chunk("a"), DONE], "ended before the answer did"),
        ([chunk("a", "length"), DONE], "no usage"),
        ([chunk("a", "stop"), USAGE, DONE], "3 of 3 tokens, finish_reason stop"),
        (['data: {"error": {"message": "broken logits"}}\n\n'], "broken logits"),
        (["data: {\n\n"], "no JSON"),
        (["data: [1]\n\n"], "no chunk"),
        ([f"data: {'[' * 100_000}\n\n"], "no JSON"),
        (['data: {"error": "out of memory"}\n\n'], "out of memory"),
        ([event({"choices": [{"index": -1, "text": "a", "finish_reason": None}]})], "no chunk"),
        ([event({"choices": [{"index": "0", "text": "a", "finish_reason": None}]})], "no chunk"),
        ([event({"choices": [{"index": 0, "text": 5, "finish_reason": None}]})], "no chunk"),
        ([event({"choices": 5})], "no chunk"),
        ([event({"choices": [], "usage": {"prompt_tokens": "x", "completion_tokens": 3}})], "no chunk"),
        ([event({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": -3}})], "no chunk"),
    ],
)
def test_a_request_that_fails_makes_the_run_fail_and_is_in_no_figure(tessera, answer: list[str], says: str):
    with scripted(GOOD, answer, GOOD) as url:
        code, out, err = tessera("bench", *ONE_BY_ONE, "--num-prompts", "3", "--base-url", url)
    figures = json.loads(out)
    assert (code, figures["completed"], figures["failed"]) == (ExitCode.FAILED, 2, 1)
    assert (figures["total_output_tokens"], says in err) == (6, True), err


def test_a_warm_up_that_fails_ends_the_benchmark(tessera):
    options = ("--concurrency", "1", "--num-prompts", "1", "--output-len", "3")
    with scripted(["refuse"]) as url:
        code, out, err = tessera("bench", *options, "--base-url", url)
    assert (code, out) == (ExitCode.FAILED, "")
    assert "1 of 1 warm-up requests failed: HTTP 429" in err


def test_generate_names_the_prompt_that_a_server_refused(tessera):
    ask = ("-p", "a", "-p", "b", "--raw", "--json", "--no-live", "--max-tokens", "3")
    with scripted(["refuse"], ["refuse"]) as url:
        code, out, err = tessera("generate", *ask, "--base-url", url)
        assert (code, "--prompt number 1 failed: HTTP 429" in err) == (ExitCode.FAILED, True)
        assert [one["finish_reason"] for one in json.loads(out)["answers"]] == ["error", "error"]
    with scripted(["refuse"], ["refuse"]) as url:
        code, _, err = tessera("generate", *ask, "--on-error", "fail", "--base-url", url)
        assert (code, "a prompt failed: HTTP 429" in err) == (ExitCode.FAILED, True)


def test_what_is_no_model_server_is_told(tessera):
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> list[int]:
        return [1]

    with serving(app) as url:
        code, _, err = tessera("bench", "--base-url", url)
    assert (code, "does not answer as OpenAI's does" in err) == (ExitCode.USAGE, True)
