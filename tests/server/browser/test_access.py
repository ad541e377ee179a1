"""Anybody can use the page: by keyboard, in a narrow window, in light and dark, and without motion."""

import re

import pytest

from tests.server.browser.actions import MARKS, Open, ask, expect
from tests.server.toy_server import ToyServer

pytestmark = MARKS


# Every text on the page has the contrast that WCAG 2.1 asks of small text (1.4.3), on what lies behind it.
LOW_CONTRAST = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return canvas.getImageData(0, 0, 1, 1).data;
  };
  const luminance = (colour) => {
    const [r, g, b] = [...rgba(colour)].slice(0, 3).map((value) => {
      const one = value / 255;
      return one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = getComputedStyle(one).backgroundColor;
      if (rgba(colour)[3] === 255) return colour;
    }
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const isText = [...element.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    if (!isText || !element.checkVisibility() || element.closest(".skip, noscript")) continue;
    const [a, b] = [getComputedStyle(element).color, behind(element)].map(luminance);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${element.tagName} ${element.textContent} ${ratio.toFixed(2)}`);
  }
  return low;
}"""


def test_all_of_it_works_from_the_keyboard(toy: ToyServer, open_page: Open) -> None:
    toy.llm.add(num_tokens=8, max_tokens=40, n=2)
    toy.llm.step()
    page = open_page()
    expect(page, "#sequences tr").to_have_count(2)
    reached: list[str] = []
    for _ in range(30):
        page.keyboard.press("Tab")
        place = page.evaluate(
            """() => {
              const one = document.activeElement;
              const style = getComputedStyle(one);
              return [one.id || one.className || one.tagName, style.outlineStyle, style.outlineWidth];
            }"""
        )
        if place[0] == "BODY":
            break
        assert place[1:] == ["solid", "2px"], f"the focus on {place[0]} cannot be seen"
        reached.append(place[0])
        if place[0] == "SUMMARY":
            page.keyboard.press("Enter")
        if place[0] == "prompt":
            page.keyboard.type("typed")
            page.keyboard.press("Enter")
            expect(page, ".assistant .note").to_contain_text("1 token")
        if place[0] == "mosaic":
            expect(page, "#block").to_contain_text("Block 1: held by request-0, shared with 1 more")
            page.keyboard.press("End")
            expect(page, "#block").to_have_text("Block 96: free")
            page.keyboard.press("ArrowLeft")
            expect(page, "#block").to_have_text("Block 95: free")
    fields = ["system", "temperature", "top-p", "max-tokens", "seed", "api-key"]
    assert reached == [
        "skip",
        "new-chat",
        "SUMMARY",
        *fields,
        "log",
        "prompt",
        "send",
        "mosaic",
        "table-frame",
    ]


@pytest.mark.parametrize("width", [360, 412, 768, 1280])
def test_nothing_is_wider_than_the_window(toy: ToyServer, open_page: Open, width: int) -> None:
    for _ in range(4):
        toy.llm.add(num_tokens=8, max_tokens=40, n=3, request_id=f"chatcmpl-{'x' * 32}{_}")
        toy.llm.step()
    page = open_page(width=width, height=740)
    page.click("summary")
    ask(page, "a-word-without-an-end-" * 20)
    expect(page, ".assistant .note").to_contain_text("1 token")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for selector in (".panel", "#send", "#mosaic", "table", ".counts > div", ".charts > div"):
        for box in (one.bounding_box() for one in page.locator(selector).all()):
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= width, selector


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(toy: ToyServer, open_page: Open, scheme: str) -> None:
    for _ in range(3):
        toy.llm.add(num_tokens=8, max_tokens=40)
    toy.llm.step()
    page = open_page(color_scheme=scheme, allowed="400")
    page.click("summary")
    ask(page, "hello")
    expect(page, ".assistant .note").to_contain_text("1 token")
    toy.refusal = "no"
    ask(page, "refuse")
    expect(page, ".failed .note").to_have_text("no")
    assert page.evaluate(LOW_CONTRAST) == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 200) == (scheme == "dark")


def test_nothing_moves_for_who_wants_it_still(toy: ToyServer, open_page: Open) -> None:
    toy.pause = 0.05
    motions = {}
    for wish in ("reduce", "no-preference"):
        page = open_page(reduced_motion=wish)
        ask(page, "w " * 200)
        expect(page, "[aria-busy=true]").to_be_visible()
        motions[wish] = page.evaluate("document.getAnimations({ subtree: true }).length")
        page.keyboard.press("Escape")
        expect(page, ".assistant .note").to_have_text("Stopped.")
    assert motions["reduce"] == 0 < motions["no-preference"]
