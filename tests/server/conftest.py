"""One server for the tests that leave it as it was."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tessera_cli.cli.app import run
from tests.server.running import Running, running


@pytest.fixture(scope="package")
def server(tiny_model_dir: Path) -> Iterator[Running]:
    with running(tiny_model_dir) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def tessera(capsys: pytest.CaptureFixture[str]):
    """Runs the program; the exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
