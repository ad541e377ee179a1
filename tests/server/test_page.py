"""The page in a real browser: its chat, its view of the pool, and that anybody can use it."""

import re
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.server.toy_server import ToyLLM, ToyServer, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
in_browser = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]
pytestmark = in_browser

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
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
        playwright.expect(page.locator("#connection")).to_have_text("live")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def expect(page: Any, selector: str) -> Any:
    return playwright.expect(page.locator(selector))


def ask(page: Any, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_an_answer_comes_as_text_whatever_is_in_it(toy: ToyServer, open_page: Open) -> None:
    page = open_page()
    text = "<img src=x onerror=alert(1)> <b>bold</b> & café 日本"
    ask(page, text)
    expect(page, ".assistant .note").to_contain_text("7 tokens · first after")
    assert page.locator(".body").all_text_contents() == [text, text]
    assert page.locator(".log img, .log b").count() == 0


def test_the_conversation_goes_on(toy: ToyServer, open_page: Open) -> None:
    page = open_page()
    for text in ("one", "two"):
        ask(page, text)
        expect(page, f".assistant:has-text('{text}') .note").to_contain_text("1 token")
    roles = [(message["role"], message["content"]) for message in toy.bodies[-1]["messages"]]
    assert roles == [("user", "one"), ("assistant", "one"), ("user", "two")]
    page.click("#new-chat")
    assert page.locator(".message").count() == 0
    ask(page, "three")
    expect(page, ".assistant .note").to_contain_text("1 token")
    assert len(toy.bodies[-1]["messages"]) == 1


def test_what_is_set_is_sent_and_what_is_not_is_left_out(toy: ToyServer, open_page: Open) -> None:
    page = open_page()
    ask(page, "plain")
    expect(page, ".assistant .note").to_contain_text("token")
    assert toy.bodies[-1] == {
        "model": "toy-student",
        "messages": [{"role": "user", "content": "plain"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 256,
    }
    page.click("summary")
    fields = {"system": "Be brief.", "temperature": "0", "top-p": "0.9", "max-tokens": "7", "seed": "-3"}
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    ask(page, "set")
    expect(page, ".assistant:has-text('set') .note").to_contain_text("token")
    body = toy.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": -3,
    }


def test_an_impossible_setting_is_shown_and_not_sent(toy: ToyServer, open_page: Open) -> None:
    page = open_page()
    page.click("summary")
    page.fill("#temperature", "-1")
    page.click("summary")
    ask(page, "hello")
    expect(page, "#temperature").to_be_focused()
    assert toy.bodies == []
    assert page.input_value("#prompt") == "hello"


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_keeps_what_has_come_and_ends_the_request(toy: ToyServer, open_page: Open, how: str) -> None:
    toy.pause = 0.05
    page = open_page()
    ask(page, " ".join(f"w{i}" for i in range(100)))
    expect(page, ".assistant .body").to_contain_text("w2")
    if how == "button":
        page.click("#stop")
    else:
        page.keyboard.press("Escape")
    expect(page, ".assistant .note").to_have_text("Stopped.")
    expect(page, "#send").to_be_visible()
    deadline = time.monotonic() + 5
    while toy.llm.scheduler.has_unfinished():
        assert time.monotonic() < deadline, "the server goes on"
        time.sleep(0.01)
    told = page.locator(".assistant .body").text_content()
    ask(page, "again")
    expect(page, ".assistant:has-text('again') .note").to_contain_text("1 token")
    assert toy.bodies[-1]["messages"][1] == {"role": "assistant", "content": told}


def test_a_refusal_is_told_and_the_message_given_back(toy: ToyServer, open_page: Open) -> None:
    page = open_page(allowed="400")
    toy.refusal = "the prompt is too long <i>"
    ask(page, "hello")
    expect(page, ".assistant .note").to_have_text("the prompt is too long <i>")
    assert page.input_value("#prompt") == "hello"
    toy.refusal = None
    page.press("#prompt", "Enter")
    expect(page, ".assistant:not(.failed) .note").to_contain_text("1 token")
    assert len(toy.bodies[-1]["messages"]) == 1


def test_a_key_that_the_server_asks_for_opens_both_halves(toy: ToyServer, chromium: Any) -> None:
    toy.required_key = "secret"
    with chromium.new_context() as context:
        page = context.new_page()
        page.goto(toy.url)
        expect(page, "#connection").to_contain_text("API key")
        ask(page, "hello")
        expect(page, ".assistant .note").to_contain_text("API key")
        page.fill("#api-key", "secret")  # the settings have opened
        page.press("#api-key", "Tab")
        expect(page, "#connection").to_have_text("live")
        expect(page, "#model").to_have_text("toy-student")
        page.press("#prompt", "Enter")
        expect(page, ".assistant:not(.failed) .note").to_contain_text("1 token")
    assert toy.keys[-1] == "Bearer secret"


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


def test_the_mosaic_shows_every_block_as_it_is(toy: ToyServer, open_page: Open) -> None:
    for _ in range(3):
        toy.llm.add(num_tokens=8, max_tokens=40, n=2)
        toy.llm.step()
    toy.llm.add(num_tokens=24, max_tokens=1)
    toy.llm.step()
    page = open_page(allowed=READBACK)
    expect(page, "#sequences tr").to_have_count(6)
    pool = toy.llm.scheduler.block_pool
    cached = pool.cached_blocks()
    kinds = tile_kinds(page)
    by_state: dict[str, set[str]] = {}
    for block in range(1, pool.num_blocks):
        state = "cached" if block in cached else "held" if pool.ref_count(block) else "free"
        by_state.setdefault(state, set()).add(kinds[block - 1].split()[0])
        assert kinds[block - 1].endswith("marked") == (pool.ref_count(block) > 1)
    assert len(by_state["free"]) == 1
    assert len(by_state["held"]) > 3, "the sequences have one colour"
    assert not by_state["free"] & by_state["held"]
    assert not by_state["cached"] & (by_state["free"] | by_state["held"])


def test_the_counts_are_the_schedulers(toy: ToyServer, open_page: Open) -> None:
    toy.llm = toy.app.state.async_llm = ToyLLM(num_blocks=33, max_num_seqs=4)
    for _ in range(6):
        toy.llm.add(num_tokens=20, max_tokens=60)
    while not toy.llm.scheduler.num_preemptions:
        toy.llm.step()
    page = open_page()
    scheduler = toy.llm.scheduler
    expect(page, "#num-running").to_have_text(str(scheduler.num_running))
    expect(page, "#num-preemptions").to_have_text(str(scheduler.num_preemptions))
    waiting, preempted = (int(page.text_content(f"#num-{name}")) for name in ("waiting", "preempted"))
    assert preempted
    assert waiting + preempted == scheduler.num_waiting


def test_the_latencies_come_with_the_tokens(toy: ToyServer, open_page: Open) -> None:
    page = open_page()
    expect(page, "#tokens-per-second").to_have_text("0")
    assert page.text_content("#ttft") == page.text_content("#tpot") == "–"
    toy.llm.add()
    toy.llm.step()
    expect(page, "#ttft").to_have_text("120 ms")
    assert page.text_content("#tpot") == "–"
    toy.llm.step()
    expect(page, "#tpot").to_have_text("50 ms")
    assert page.locator("#tpot-line .line").get_attribute("d")


def test_the_view_comes_back_after_the_server(toy: ToyServer, open_page: Open) -> None:
    from tessera_cli.serving.async_llm import Status

    page = open_page(allowed="503")
    toy.app.state.async_llm = None
    toy.llm.status = Status.DEAD
    expect(page, "#connection").to_have_attribute("data-state", "lost")
    toy.app.state.async_llm = ToyLLM(num_blocks=41)
    expect(page, "#connection").to_have_text("live")
    expect(page, "#pool-sum").to_contain_text("40 blocks")


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


def test_tiles_change_with_the_scheme(toy: ToyServer, open_page: Open) -> None:
    page = open_page(color_scheme="light", allowed=READBACK)
    (light,) = set(tile_kinds(page))
    page.emulate_media(color_scheme="dark")
    deadline = time.monotonic() + 5
    while light in tile_kinds(page):
        assert time.monotonic() < deadline, "a tile has kept its colour"


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
