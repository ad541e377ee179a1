"""The route of the live view over a real engine, and who may read it."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from tests.server.running import MODEL, Running, running

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What is a page?"}], "temperature": 0}


def first_event(http: httpx.Client) -> dict[str, Any]:
    with http.stream("GET", "/live") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        line = next(line for line in answer.iter_lines() if line)
    return json.loads(line.removeprefix("data: "))


def test_the_first_event_is_the_engine_as_it_is(server: Running) -> None:
    server.http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 40}).raise_for_status()
    server.wait_until_idle()
    event, stats = first_event(server.http), server.llm.stats
    assert (event["num_blocks"], event["block_size"]) == (stats.num_blocks, stats.block_size)
    assert sum(count for _, count, owner, _ in event["tiles"] if owner == -1) == stats.num_cached_blocks > 0
    assert event["sequences"] == []


def test_the_events_follow_a_request(server: Running) -> None:
    seen, times = set(), {"ttft": 0, "tpot": 0}
    with server.http.stream("GET", "/live") as live:
        events = (json.loads(line[6:]) for line in live.iter_lines() if line)
        next(events)
        body = CHAT | {"max_tokens": 200, "n": 2, "stream": True, "ignore_eos": True}
        with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            for _ in answer.iter_lines():
                pass
        for event in islice(events, 200):
            seen |= {owner for _, _, owner, _ in event["tiles"]}
            for name in times:
                times[name] += event[name] is not None
            if times["ttft"] and times["tpot"] and not event["num_running"]:
                break
    assert all(times.values())
    assert -1 in seen, "nothing was cached"
    server.wait_until_idle()


def test_the_events_need_a_key_and_the_page_does_not(tiny_model_dir: Path) -> None:
    with running(tiny_model_dir, api_keys=("secret",)) as server:
        assert server.http.get("/").status_code == server.http.get("/page/main.js").status_code == 200
        assert server.http.get("/live").status_code == 401
        server.http.headers["Authorization"] = "Bearer secret"
        assert first_event(server.http)["num_running"] == 0


def test_an_open_page_does_not_keep_a_server_from_ending(tiny_model_dir: Path) -> None:
    with running(tiny_model_dir) as server, server.http.stream("GET", "/live") as live:
        lines = live.iter_lines()
        next(lines)
        server.llm.drain()
        assert len(list(islice(lines, 100))) < 100, "the events go on"
