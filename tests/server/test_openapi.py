"""Random requests made from the OpenAPI document: none of them is a server's error."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error

from tests.server.running import Running, running

PATHS = {
    "GET": ["/health", "/metrics", "/v1/models", "/v1/models/{name}", "/version"],
    "POST": ["/detokenize", "/tokenize", "/v1/chat/completions", "/v1/completions", "/v1/responses"],
}


@pytest.fixture(scope="module")
def fuzzed(tiny_model_dir: Path) -> Iterator[Running]:
    """A server of its own, whose answers are short whatever is asked of it."""
    with running(tiny_model_dir, engine_options={"max_model_len": 24}) as server:
        yield server
        server.wait_until_idle()


@pytest.fixture(scope="module")
def document(fuzzed: Running) -> Any:
    return schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")


def test_the_document_has_every_route(fuzzed: Running) -> None:
    paths = fuzzed.http.get("/openapi.json").json()["paths"]
    assert sorted(paths) == sorted(path for some in PATHS.values() for path in some)


@pytest.mark.parametrize(
    ("method", "path"), [(method, path) for method, some in PATHS.items() for path in some]
)
def test_no_request_is_an_error_of_the_server(document: Any, method: str, path: str) -> None:
    @given(case=document[path][method].as_strategy())
    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        case.call_and_validate(checks=[not_a_server_error], timeout=20)

    check()
