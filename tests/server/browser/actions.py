"""What the tests of the page do in the browser, and what they read from it."""

from collections.abc import Callable
from typing import Any

import pytest

MARKS = [pytest.mark.slow, pytest.mark.browser]
Open = Callable[..., Any]


def expect(page: Any, selector: str) -> Any:
    """Playwright's expectations, which wait, of what `selector` finds."""
    from playwright import sync_api

    return sync_api.expect(page.locator(selector))


def ask(page: Any, text: str) -> None:
    """Send a message with the keyboard."""
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


READBACK = "willReadFrequently"  # what Chromium says of a test that reads pixels


def tile_kinds(page: Any) -> list[str]:
    """The colour of each tile at its upper edge, and whether it has a mark in the middle."""
    return page.evaluate(
        """() => {
          const canvas = document.getElementById("mosaic");
          const context = canvas.getContext("2d");
          const frame = canvas.parentElement;
          const pitch = 20;  // a small pool in a wide window at one device pixel a CSS pixel
          const columns = canvas.width / pitch;
          return Array.from({ length: 96 }, (_, tile) => {
            const [x, y] = [(tile % columns) * pitch, Math.floor(tile / columns) * pitch];
            const at = (dx, dy) => context.getImageData(x + dx, y + dy, 1, 1).data.join();
            return `${at(9, 2)} ${at(9, 9) === at(9, 2) ? "plain" : "marked"}`;
          });
        }"""
    )
