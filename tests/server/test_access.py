"""Who may ask, and what is written down of it."""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tessera_cli.serving.api.access_log import LOG
from tests.server.running import MODEL, Running, running

LONG: dict[str, Any] = {"model": MODEL, "prompt": "The quick", "max_tokens": 200, "ignore_eos": True}


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
