"""A browser, a server of the page, and the page in the browser."""

import re
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.browser.actions import Open, expect
from tests.server.toy_server import ToyServer, serving


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def toy() -> Iterator[ToyServer]:
    with serving() as server:
        yield server


@pytest.fixture
def open_page(chromium: Any, toy: ToyServer) -> Iterator[Open]:
    """Opens the page; in the end nothing has been asked from elsewhere, and nothing went wrong in it."""
    contexts, faults = [], []

    def open_page(*, width: int = 1280, height: int = 800, allowed: str = "$^", **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda told: re.search(allowed, told.text) or faults.append(told.text))
        page.on("request", lambda asked: asked.url.startswith(toy.url) or faults.append(asked.url))
        page.goto(toy.url)
        expect(page, "#connection").to_have_text("live")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []
