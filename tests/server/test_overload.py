"""More requests than an engine has room for: all are answered or refused, and none starves."""

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import MODEL, running

LONG: dict[str, Any] = {"model": MODEL, "prompt": "The quick", "max_tokens": 200, "ignore_eos": True}


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
