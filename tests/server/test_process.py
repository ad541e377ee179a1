"""`tessera serve` as a process: bound before it is loaded, drained by one signal, ended by two."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

LONG: dict[str, Any] = {"model": "tiny", "prompt": "The quick", "max_tokens": 480, "ignore_eos": True}


@contextmanager
def serving(model_dir: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The process, the URL that it tells, and its lines on stderr as they come."""
    arguments = ["serve", str(model_dir), "--port", "0", "--served-model-name", "tiny", *options]
    process = subprocess.Popen(
        [sys.executable, "-m", "tessera_cli", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TESSERA_API_KEY": "a, b"},
    )
    assert process.stderr is not None
    lines: list[str] = []
    first = process.stderr.readline()
    found = re.search(r"https?://\S+:\d+", first)
    rest = process.stderr
    reader = threading.Thread(target=lambda: lines.extend(rest))
    reader.start()
    try:
        assert found is not None, first
        yield process, found[0], lines
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stderr.close()


def wait_until_ready(http: httpx.Client) -> list[int]:
    """The codes of /health on the way to 200."""
    codes: list[int] = []
    deadline = time.monotonic() + 120
    while 200 not in codes:
        assert time.monotonic() < deadline
        try:
            codes.append(http.get("/health").status_code)
        except httpx.ConnectError:  # bound, and uvicorn does not listen yet
            time.sleep(0.02)
    return codes


def test_a_server_is_bound_before_it_is_loaded_and_drained_by_a_signal(tiny_model_dir: Path) -> None:
    options = ("--device", "cpu", "--num-blocks", "100", "--drain-timeout", "60")
    with (
        serving(tiny_model_dir, *options) as (process, url, lines),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        http.headers["authorization"] = "Bearer b"
        assert wait_until_ready(http)[0] == 503
        assert http.get("/v1/models", headers={"authorization": "Bearer c"}).status_code == 401
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in events if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert process.wait(30) == 0
    assert any('"path": "/v1/completions"' in line for line in lines)
    assert not any("Traceback" in line for line in lines)


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tiny_model_dir: Path) -> None:
    with (
        serving(tiny_model_dir, "--device", "cpu", "--num-blocks", "100") as (process, url, _),
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        http.headers["authorization"] = "Bearer a"
        wait_until_ready(http)
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 64}) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--ssl-certfile", "x.pem"), "TLS needs a certificate and its key"),
        (("--host", "256.0.0.1"), "cannot listen on 256.0.0.1"),
        (("--port", "70000"), "--port"),
        (("--api-key", ""), "API key is empty"),
        (("--ssl-certfile", "x.pem", "--ssl-keyfile", "y.pem"), "no TLS: x.pem cannot be read"),
    ],
)
def test_what_cannot_be_served_is_an_error_in_a_line(
    capsys: pytest.CaptureFixture[str], tiny_model_dir: Path, options: tuple[str, ...], said: str
) -> None:
    from tessera_cli.cli.app import run

    assert run(["serve", str(tiny_model_dir), *options]) == 2
    assert said in capsys.readouterr().err
