"""Clients that leave, engines that fail, queues that are full: the server stays up and loses nothing."""

import asyncio
import json
import logging
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera_cli.engine import model_runner
from tessera_cli.serving.api.access_log import LOG
from tests.server.running import MODEL, Running, running

LONG: dict[str, Any] = {"model": MODEL, "prompt": "The quick", "max_tokens": 200, "ignore_eos": True}


def slow_down(server: Running, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[int]:
    """Let every step take `seconds` more; a list that grows by the sequences of each step."""
    sizes: list[int] = []
    run = server.engine._runner.run

    def slow(output: Any, *others: Any) -> Any:
        sizes.append(len(output.scheduled))
        time.sleep(seconds)
        return run(output, *others)

    monkeypatch.setattr(server.engine._runner, "run", slow)
    return sizes


def wait_for(condition: Any, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {}, {"stream": True, "n": 3}, {"prompt": ["a", "b", "c"]}]
)
@pytest.mark.parametrize("after", [0, 3])
def test_a_client_that_leaves_gives_its_blocks_back(
    server: Running, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], after: int
) -> None:
    sizes = slow_down(server, monkeypatch, 0.02)

    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            asking = asyncio.create_task(client.post("/v1/completions", json=LONG | fields))
            while len(sizes) <= after:
                await asyncio.sleep(0.002)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    asyncio.run(leave())
    server.wait_until_idle()
    assert len(sizes) < 100, "it ran to its end"


def test_a_client_that_leaves_between_two_pieces_of_its_stream_is_noticed(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = slow_down(server, monkeypatch, 0.01)
    with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        next(answer.iter_lines())
    server.wait_until_idle()
    assert len(sizes) < 150


def test_a_slow_reader_holds_up_nobody(server: Running) -> None:
    async def read() -> None:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as slow,
        ):
            lines = slow.aiter_lines()
            await anext(lines)
            for _ in range(5):
                quick = await client.post("/v1/completions", json=LONG | {"max_tokens": 3})
                assert quick.status_code == 200
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"

    asyncio.run(read())
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_fails_its_requests_with_the_cause(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tiny_model_dir) as server:
        run = server.engine._runner.run
        steps = iter(range(10_000))

        def break_down(output: Any, *others: Any) -> Any:
            if next(steps) == 3:
                raise RuntimeError("the GPU is on fire")
            return run(output, *others)

        monkeypatch.setattr(server.engine._runner, "run", break_down)
        answer = server.http.post("/v1/completions", json=LONG | {"stream": stream})
        assert answer.status_code == (200 if stream else 500)
        assert "the GPU is on fire" in answer.text
        server.wait_until_idle()
        health = server.http.get("/health")
        assert health.status_code == 200
        assert health.json()["num_faults"] == 1
        assert "on fire" in health.json()["last_fault"]
        assert server.http.post("/v1/completions", json=LONG | {"max_tokens": 3}).status_code == 200
        assert server.metric("tessera:engine_faults_total") == 1
    assert "on fire" in caplog.text


def test_faults_without_end_are_unhealthy_until_a_step_succeeds(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tiny_model_dir) as server:
        with monkeypatch.context() as broken:
            broken.setattr(model_runner, "sample", lambda *_, **__: 1 / 0)
            for _ in range(3):
                assert server.http.post("/v1/completions", json=LONG).status_code == 500
            health = server.http.get("/health")
            assert health.status_code == 503
            assert health.json()["status"] == "failing"
        assert server.http.post("/v1/completions", json=LONG | {"max_tokens": 2}).status_code == 200
        assert server.http.get("/health").status_code == 200
        server.wait_until_idle()


def test_a_row_that_is_not_a_number_fails_alone(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = model_runner.sample

    def poison(logits: Any, rows: Any, **options: Any) -> Any:
        for index, row in enumerate(rows):
            if row.params.seed == 666:
                logits[index] = float("nan")
        return sample(logits, rows, **options)

    monkeypatch.setattr(model_runner, "sample", poison)

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            bodies = [LONG | {"max_tokens": 5, "seed": seed} for seed in (1, 666, 2, 3)]
            return list(await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)))

    answers = asyncio.run(ask())
    assert [answer.status_code for answer in answers] == [200, 500, 200, 200]
    assert "finite" in answers[1].text
    server.wait_until_idle()


def test_a_step_without_end_is_unhealthy_and_an_idle_engine_is_not(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tiny_model_dir, llm_options={"stall_after": 0.2}) as server:
        time.sleep(0.3)
        assert server.http.get("/health").status_code == 200
        slow_down(server, monkeypatch, 1.0)
        with server.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}):
            wait_for(lambda: server.http.get("/health").json()["status"] == "stalled")
            assert server.http.get("/health").status_code == 503
        monkeypatch.undo()
        wait_for(lambda: server.http.get("/health").status_code == 200)
        server.wait_until_idle()


def test_an_engine_thread_that_dies_is_told_to_everybody(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tiny_model_dir) as server:
        monkeypatch.setattr(server.engine, "stats", lambda: 1 / 0)
        answer = server.http.post("/v1/completions", json=LONG)
        assert answer.status_code == 500
        assert "division by zero" in answer.text
        assert server.http.get("/health").json()["status"] == "dead"
        assert server.http.get("/health").status_code == 503
        assert server.http.post("/v1/completions", json=LONG).status_code == 500


def test_an_answer_that_takes_too_long_is_given_up(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tiny_model_dir, request_timeout=0.3) as server:
        slow_down(server, monkeypatch, 0.05)
        answer = server.http.post("/v1/completions", json=LONG)
        assert answer.status_code == 504
        server.wait_until_idle()
        answer = server.http.post("/v1/completions", json=LONG | {"stream": True})
        assert answer.status_code == 200
        assert "not finished after 0.3 seconds" in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
        server.wait_until_idle()


def test_beyond_capacity_everyone_gets_an_answer_or_a_429(tiny_model_dir: Path) -> None:
    sizes = {"num_blocks": 33, "max_model_len": 64, "block_size": 4, "max_num_seqs": 16}
    with running(tiny_model_dir, llm_options={"max_queue": 400}, engine_options=sizes) as server:

        async def ask() -> list[httpx.Response]:
            limits = httpx.Limits(max_connections=512)
            async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
                body = LONG | {"max_tokens": 9, "prompt": "The quick brown fox jumps"}
                return list(
                    await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(512)))
                )

        answers = asyncio.run(ask())
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 400
        for answer in answers:
            if answer.status_code == 429:
                assert int(answer.headers["retry-after"]) >= 1
            else:
                assert answer.json()["usage"]["completion_tokens"] == 9
        server.wait_until_idle()
        assert server.metric("tessera:num_preemptions_total") > 0
        assert server.metric("tessera:requests_rejected_total") == codes.count(429)
        assert server.metric("tessera:kv_blocks_free") == server.metric("tessera:kv_blocks_total") == 32


def test_the_oldest_request_loses_no_step_to_a_flood(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_blocks": 33, "max_model_len": 64, "block_size": 4, "max_num_seqs": 16}
    with running(tiny_model_dir, engine_options=sizes) as server:
        steps: list[set[str]] = []
        run = server.engine._runner.run

        def watched(output: Any, *others: Any) -> Any:
            steps.append({item.sequence.request_id for item in output.scheduled})
            return run(output, *others)

        monkeypatch.setattr(server.engine._runner, "run", watched)

        async def ask() -> int:
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                body = LONG | {"max_tokens": 40, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as oldest:
                    lines = oldest.aiter_lines()
                    await anext(lines)
                    flood = [
                        client.post("/v1/completions", json=LONG | {"max_tokens": 20}) for _ in range(64)
                    ]
                    answers = asyncio.gather(*flood)
                    assert [line async for line in lines if line][-1] == "data: [DONE]"
                    return sum(answer.status_code == 200 for answer in await answers)

        assert asyncio.run(ask()) == 64
        (first,) = steps[0]
        num_steps = sum(first in step for step in steps)
        assert all(first in step for step in steps[:num_steps])
        assert num_steps == 40
        server.wait_until_idle()
        assert server.metric("tessera:num_preemptions_total") > 0


def test_a_storm_of_mixed_requests_a_third_of_which_leave_loses_nothing(tiny_model_dir: Path) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "max_tokens": 12}
    kinds = [
        ("/v1/completions", LONG | {"max_tokens": 20, "n": 3, "logprobs": 1}),
        ("/v1/completions", LONG | {"max_tokens": 12, "stream": True, "prompt": ["a", "b"], "stop": ["e"]}),
        ("/v1/chat/completions", chat | {"response_format": {"type": "json_object"}}),
        ("/v1/chat/completions", chat | {"stream": True}),
    ]
    generator = random.Random(0)
    plans = [(*generator.choice(kinds), generator.choice((None, None, 0.2))) for _ in range(200)]

    async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], patience: float | None) -> Any:
        try:
            async with asyncio.timeout(patience and generator.uniform(0.0, patience)):
                return (await client.post(path, json=body)).status_code
        except TimeoutError:
            return "left"

    async def storm(url: str) -> list[Any]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return await asyncio.gather(*(ask(client, *plan) for plan in plans))

    with running(tiny_model_dir, engine_options={"num_blocks": 60}) as server:
        fates = asyncio.run(storm(server.url))
        assert set(fates) == {200, "left"}
        server.wait_until_idle()
        assert server.http.get("/health").status_code == 200


def test_access_lines_have_counts_and_no_prompts(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(log_prompts: bool) -> list[dict[str, Any]]:
        caplog.clear()
        with (
            caplog.at_level(logging.INFO, "tessera.access"),
            running(tiny_model_dir, log_prompts=log_prompts) as server,
        ):
            body = LONG | {"prompt": "my secret", "max_tokens": 3, "user": "ada"}
            server.http.post("/v1/completions", json=body, headers={"x-request-id": "r1"})
        records = [record.getMessage() for record in caplog.records if record.name == "tessera.access"]
        assert log_prompts == any("secret" in record for record in records)
        return [json.loads(record) for record in records]

    (line,) = [line for line in lines(log_prompts=False) if line["path"] == "/v1/completions"]
    assert line["request_id"] == "r1"
    assert line["status"] == 200
    assert line["completion_tokens"] == 3
    assert line["user"] == "ada"
    assert line["finish_reasons"] == ["length"]
    lines(log_prompts=True)


def test_a_log_that_cannot_be_written_stops_nobody(server: Running) -> None:
    with suppress(OSError), open("/dev/full", "w") as full:
        handler = logging.StreamHandler(full)
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO)
        try:
            for _ in range(3):  # closing the file fails, too
                assert server.http.get("/version").status_code == 200
        finally:
            LOG.removeHandler(handler)
            LOG.setLevel(logging.NOTSET)


def test_only_a_key_opens_the_api(tiny_model_dir: Path) -> None:
    with running(tiny_model_dir, api_keys=("one", "zwei"), allowed_origins=("https://a.example",)) as server:
        for header in ({}, {"authorization": "Bearer no"}, {"authorization": "one"}):
            for path in ("/v1/models", "/metrics", "/version", "/v1/completions"):
                answer = server.http.get(path, headers=header)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for key in ("one", "zwei"):
            answer = server.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.json()["data"][0]["id"] == MODEL
        assert server.http.get("/health").status_code == 200
        asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
        allowed = server.http.options("/v1/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = server.http.options("/v1/completions", headers=asked | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
