"""Hostile requests: each gets its 4xx, and the next honest one its answer."""

import json
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tessera_cli.serving.api.bounded_http import BoundedHttp
from tests.server.running import MODEL, Running, running

GOOD = {"model": MODEL, "prompt": "fox", "max_tokens": 2, "temperature": 0}


@pytest.fixture(autouse=True)
def _serves_the_next(server: Running) -> Any:
    yield
    answer = server.http.post("/v1/completions", json=GOOD)
    assert answer.status_code == 200
    assert server.http.get("/health").json()["status"] == "ok"
    server.wait_until_idle()


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"\xff\xfe"',
        b'{"model": "\xed\xa0\x80"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b'{"model": "tiny", "prompt": ' + b"9" * 10_000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_bodies_that_are_no_requests_are_refused(server: Running, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(server.http.post(path, content=body, headers=headers), 400)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"384": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"1": 101}},
        {"logit_bias": {"١": 1}},
        {"logit_bias": {"9" * 5000: 1}},
        {"stop_token_ids": [2**63]},
        {"stop_token_ids": [-1]},
        {"prompt": [2**70]},
        {"prompt": [-5]},
        {"prompt": [True]},
        {"prompt": [[]]},
        {"prompt": []},
        {"prompt": ["ok", ""]},
        {"prompt": ["x"] * 2000},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": "5"},
        {"n": 0},
        {"n": 2**40},
        {"top_p": 0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"temperature": -0.1},
        {"repetition_penalty": 0},
        {"presence_penalty": 3},
        {"seed": 2**64},
        {"stop": [""]},
        {"stop": {"a": 1}},
        {"echo": "yes"},
        {"stream": 1},
        {"cache_salt": 5},
        {"min_tokens": 5},
        {"__class__": "x"},
    ],
)
def test_hostile_fields_are_refused(server: Running, fields: dict[str, Any]) -> None:
    answer = server.http.post("/v1/completions", json=GOOD | fields)
    status = 429 if fields == {"prompt": ["x"] * 2000} else 400
    error_of(answer, status)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"prompt": [1] * 300}, "prompt"), ({"prompt": "long " * 300}, "prompt"), ({"priority": 3}, "priority")],
)
def test_what_the_engine_refuses_is_told_by_the_clients_own_field(
    server: Running, fields: dict[str, Any], param: str
) -> None:
    error = error_of(server.http.post("/v1/completions", json=GOOD | fields), 400)
    assert error["param"] == param
    assert param in error["message"]
    assert "request" not in error["message"]


def test_an_output_longer_than_the_context_ends_with_it(server: Running) -> None:
    body = GOOD | {"max_tokens": 2**70, "ignore_eos": True}
    choice = server.http.post("/v1/completions", json=body).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_a_body_of_50_mb_is_refused(server: Running) -> None:
    body = json.dumps(GOOD | {"prompt": "x" * 50_000_000})
    answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error_of(answer, 413)
    chunks = (b"x" * 1_000_000 for _ in range(50))
    error_of(server.http.post("/v1/completions", content=chunks), 413)


def raw(server: Running, data: bytes) -> bytes:
    """What the server says to `data` until it hangs up, which it may do before it has read all."""
    host, port = server.url.removeprefix("http://").split(":")
    answer = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection, suppress(ConnectionError):
        connection.sendall(data)
        with suppress(OSError):  # not connected any more
            connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            answer += part
    return answer


def test_ten_thousand_headers_are_refused(server: Running) -> None:
    lines = b"".join(b"x-%d: yyyyyyyyyyyyyyyyyyyy\r\n" % number for number in range(10_000))
    answer = raw(server, b"GET /version HTTP/1.1\r\nhost: x\r\n" + lines + b"\r\n")
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize("data", [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 100])
def test_what_is_not_http_is_refused(server: Running, data: bytes) -> None:
    assert raw(server, data) == b"" or raw(server, data).startswith(b"HTTP/1.1 4")


def test_a_body_that_stops_short_holds_nothing(server: Running) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
    assert not raw(server, head + b'{"mod').startswith(b"HTTP/1.1 2")


def test_a_request_id_is_kept_if_it_is_harmless(server: Running) -> None:
    def told(given: str) -> str:
        return str(server.http.get("/version", headers={"x-request-id": given}).headers["x-request-id"])

    assert told("abc-1.2:3") == "abc-1.2:3"
    assert told("a b") != "a b"
    assert told("x" * 129) != "x" * 129


def test_unknown_paths_and_methods_have_errors_of_the_same_shape(server: Running) -> None:
    error_of(server.http.get("/v1/embeddings"), 404)
    error_of(server.http.get("/v1/completions"), 405)
    error_of(server.http.get("/v1/models/other"), 404)


def drip(server: Running, data: bytes) -> tuple[bytes, int]:
    """Send `data` byte by byte until the server hangs up; what it said, and how many bytes it took."""
    host, port = server.url.removeprefix("http://").split(":")
    answer, sent = b"", 0
    with socket.create_connection((host, int(port)), timeout=10) as connection, suppress(ConnectionError):
        connection.setblocking(False)
        for sent in range(len(data)):
            connection.send(data[sent : sent + 1])
            time.sleep(0.02)
            with suppress(BlockingIOError):
                answer += (part := connection.recv(65536))
                if not part:
                    break
    return answer, sent


def test_a_head_of_one_byte_at_a_time_is_hung_up_on(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "head_timeout", 0.3)
    data = b"GET /version HTTP/1.1\r\nx-slow: " + b"y" * 1000
    answer, sent = drip(server, data)
    assert answer == b""
    assert sent < len(data) - 1


def test_a_body_of_one_byte_at_a_time_is_a_408(tiny_model_dir: Path) -> None:
    with running(tiny_model_dir, body_timeout=0.3) as slow:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n"
        host, port = slow.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(head + b"{")
            assert connection.recv(65536).startswith(b"HTTP/1.1 408")
        assert slow.http.post("/v1/completions", json=GOOD).status_code == 200


def test_a_connection_that_says_nothing_is_closed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "head_timeout", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize("size", [40_000, 2_000_000])
def test_a_head_that_is_too_large_is_refused_whether_it_ends_or_not(server: Running, size: int) -> None:
    for end in (b"", b"\r\n\r\n"):
        answer = raw(server, b"GET /version HTTP/1.1\r\nhost: x\r\nx-large: " + b"y" * size + end)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def test_requests_on_one_connection_have_a_head_of_their_own(server: Running) -> None:
    for _ in range(3):
        assert server.http.get("/version", headers={"x-large": "y" * 20_000}).status_code == 200
        assert server.http.post("/v1/completions", json=GOOD | {"user": "u" * 50_000}).status_code == 200
