"""The files of the page, as they are served: strict headers, and nothing from elsewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tessera_cli.serving.api.live_view import PAGE
from tests.server.toy_server import ToyServer, serving

FILES = sorted(path.name for path in PAGE.iterdir())


@pytest.fixture(scope="module")
def toy() -> Iterator[ToyServer]:
    with serving() as server:
        yield server


@pytest.mark.parametrize("path", ["", *(f"page/{name}" for name in FILES)])
def test_every_file_comes_with_a_strict_policy(toy: ToyServer, path: str) -> None:
    answer = httpx.get(toy.url + path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "*" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_the_page_is_html_and_its_modules_are_javascript(toy: ToyServer) -> None:
    assert httpx.get(toy.url).headers["content-type"].startswith("text/html")
    assert "javascript" in httpx.get(f"{toy.url}page/main.js").headers["content-type"]


@pytest.mark.parametrize("path", ["page/%2e%2e/llm.py", "page/..%2fllm.py", "page/nothing.js", "page/"])
def test_nothing_else_is_served(toy: ToyServer, path: str) -> None:
    assert httpx.get(toy.url + path).status_code == 404


def test_without_a_model_the_events_are_503_and_the_page_is_there(toy: ToyServer) -> None:
    llm, toy.app.state.async_llm = toy.app.state.async_llm, None
    try:
        assert httpx.get(toy.url).status_code == 200
        answer = httpx.get(f"{toy.url}live")
    finally:
        toy.app.state.async_llm = llm
    assert answer.status_code == 503
    assert "loaded" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", sorted(PAGE.iterdir()), ids=lambda path: path.name)
def test_no_file_names_another_place_or_writes_html(path: Path) -> None:
    # The name of SVG looks like a place and is none.
    text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//\w+\.\w|@import|url\(", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text)
    assert not re.search(r"\beval\b|new Function", text)
    assert not re.search(r"""\s(style|on\w+)=["']""", text)
    assert "<script>" not in text
