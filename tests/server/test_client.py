"""`bench` and `generate` with --base-url: what a server answers is what an engine here would."""

import json
from pathlib import Path

import pytest

from tessera_cli.errors import ExitCode
from tests.server.running import MODEL, Running, running

SHAPE = ["--vocab-size", "250", "--input-len", "8", "--output-len", "6", "--num-prompts", "6"]
LOAD = [*SHAPE, "--concurrency", "3", "--num-warmups", "1"]


def test_a_server_does_the_work_of_an_engine_here(tessera, server: Running, tiny_model_dir: Path):
    code, out, err = tessera("bench", *LOAD, "--json", "--base-url", server.url, "--n", "2")
    remote = json.loads(out)
    assert code == ExitCode.SUCCESS, err
    here = json.loads(
        tessera("bench", str(tiny_model_dir), *LOAD, "--json", "--num-blocks", "64", "--n", "2")[1]
    )
    same = ("completed", "failed", "total_input_tokens", "total_output_tokens", "max_concurrent_requests")
    assert {name: remote[name] for name in same} == {name: here[name] for name in same}
    assert remote["config"]["prompts_sha256"] == here["config"]["prompts_sha256"]
    assert (remote["backend"], remote["model_id"]) == ("openai", MODEL)
    for metric in ("ttft", "tpot", "e2el"):
        assert 0 < remote[f"mean_{metric}_ms"] <= remote["mean_e2el_ms"]
    # What only the engine's own process sees is not made up.
    assert remote["preemptions"] is remote["prefix_cache_hit_rate"] is remote["output_sha256"] is None
    assert "kv_cache" not in err
    assert "completed=6/6" in err
    server.wait_until_idle()


def test_a_server_is_asked_at_a_rate_with_a_limit(tessera, server: Running):
    options = ("--request-rate", "500", "--concurrency", "2", "--num-warmups", "0", "--json")
    figures = json.loads(tessera("bench", *SHAPE, *options, "--base-url", f"{server.url}/v1/")[1])
    assert (figures["completed"], figures["request_rate"]) == (6, 500)
    assert figures["max_concurrent_requests"] <= 2


def test_texts_and_chats_of_a_file_go_to_the_servers_own_tokenizer(tessera, server: Running, tmp_path: Path):
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt": "The quick", "max_tokens": 2}, {"messages": [{"role": "user", "content": "Hi"}]}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ["--output-len", "3", "--concurrency", "2", "--prompt-file", str(prompts), "--json"]
    code, out, err = tessera("bench", MODEL, *options, "--base-url", server.url)
    assert code == ExitCode.SUCCESS, err
    assert (json.loads(out)["completed"], json.loads(out)["total_output_tokens"]) == (2, 5)


def test_a_server_as_the_baseline_answers_the_same_requests(tessera, server: Running, tiny_model_dir: Path):
    code, out, err = tessera(
        *("bench", str(tiny_model_dir), *LOAD, "--num-blocks", "64", "--json", "--baseline", server.url)
    )
    figures = json.loads(out)
    assert code == ExitCode.SUCCESS, err
    assert figures["baseline"]["total_output_tokens"] == figures["total_output_tokens"]
    assert figures["baseline"]["total_input_tokens"] == figures["total_input_tokens"]
    expected = figures["output_throughput"] / figures["baseline"]["output_throughput"]
    assert figures["baseline"]["ratio"] == pytest.approx(expected)


@pytest.mark.parametrize("form", ["--chat", "--raw"])
def test_generate_has_the_same_text_from_a_server(tessera, server: Running, tiny_model_dir: Path, form: str):
    ask = ("-p", "The quick", "-p", "Once upon", "--max-tokens", "8", form, "--json", "--no-live")
    here = json.loads(tessera("generate", str(tiny_model_dir), "--num-blocks", "64", *ask)[1])
    code, out, err = tessera("generate", *ask, "--base-url", server.url)
    there = json.loads(out)
    assert code == ExitCode.SUCCESS, err
    same = ("index", "prompt", "text", "finish_reason", "num_prompt_tokens", "num_output_tokens", "error")
    assert [[one[name] for name in same] for one in there["answers"]] == [
        [one[name] for name in same] for one in here["answers"]
    ]
    assert there["summary"]["total_output_tokens"] == here["summary"]["total_output_tokens"]
    assert there["summary"]["peak_memory_bytes"] is None
    assert "peak memory" not in err


def test_generate_streams_from_a_server_and_tells_log_probabilities(
    tessera, server: Running, tiny_model_dir: Path
):
    ask = ("-p", "The quick", "--max-tokens", "5", "--logprobs", "2")
    here = json.loads(tessera("generate", str(tiny_model_dir), "--num-blocks", "64", *ask, "--json")[1])
    there = json.loads(tessera("generate", *ask, "--json", "--base-url", server.url)[1])
    tokens = [[row["token"] for row in one["answers"][0]["logprobs"]["content"]] for one in (here, there)]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 5
    streamed = tessera("generate", *ask[:4], "--format", "text", "--stream", "--base-url", server.url)[1]
    assert streamed == there["answers"][0]["text"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "--block-size", "8", "--trace", "t.jsonl"], "--block-size, --trace: for an engine"),
        (["bench", "--preset", "pressure"], "--max-model-len, --num-blocks: for an engine"),
        (["bench", "--baseline", "transformers"], "needs the model itself"),
        (["bench", "no-such-model"], "does not serve 'no-such-model'"),
        (["bench", "--dataset-path", "SHARE"], "give --output-len"),
        (["bench", "a", "--model", "b"], "two models"),
        (["generate", "-p", "x", "--dtype", "float32"], "--dtype: for an engine"),
        (["generate", "-p", "x", "--regex", "a+"], "--regex: for an engine"),
        (["generate", "-p", "x", "--n", "2"], "n above 1"),
        (["generate", "-p", "x", "--raw", "--logprobs", "1"], "logprobs"),
        (["generate", "-p", "x", "--raw", "--json-schema", "{}"], "JSON schema"),
    ],
)
def test_what_a_server_cannot_be_asked_is_told_before_any_request(
    tessera, server: Running, tmp_path: Path, arguments: list[str], says: str
):
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]
    share = tmp_path / "share.json"
    share.write_text(json.dumps([{"conversations": talk}] * 300))
    words = [str(share) if word == "SHARE" else word for word in arguments]
    code, _, err = tessera(*words, "--base-url", server.url)
    assert (code, says in err) == (ExitCode.USAGE, True), err
    assert "state=" not in err


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("nonsense", ExitCode.USAGE),
        ("ftp://127.0.0.1", ExitCode.USAGE),
        ("http://", ExitCode.USAGE),
        ("http://127.0.0.1:8000/v1?x=1", ExitCode.USAGE),
        ("http://127.0.0.1:9/", ExitCode.FAILED),
    ],
)
def test_where_no_server_answers_it_is_said(tessera, address: str, expected: ExitCode):
    code, _, err = tessera("bench", *LOAD, "--base-url", address)
    assert code == expected
    assert "Traceback" not in err
    assert "hint:" in err


def test_a_key_opens_a_server_and_none_does_not(
    tessera, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    with running(tiny_model_dir, api_keys=("secret",)) as locked:
        code, _, err = tessera("bench", *LOAD, "--base-url", locked.url)
        assert (code, "TESSERA_API_KEY" in err) == (ExitCode.USAGE, True)
        assert tessera("bench", *LOAD, "--base-url", locked.url, "--api-key", "secret")[0] == ExitCode.SUCCESS
        monkeypatch.setenv("TESSERA_API_KEY", "secret,other")
        assert tessera("bench", *LOAD, "--base-url", locked.url)[0] == ExitCode.SUCCESS
