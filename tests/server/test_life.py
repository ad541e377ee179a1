"""Clients that leave, engines that fail, queues that are full: the server stays up and loses nothing."""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tessera_cli.engine import model_runner
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
