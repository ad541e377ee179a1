"""The live view of the page: its tiles and its numbers are those of the scheduler."""

import time

from tests.server.browser.actions import MARKS, READBACK, Open, expect, tile_kinds
from tests.server.toy_server import ToyLLM, ToyServer

pytestmark = MARKS


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


def test_tiles_change_with_the_scheme(toy: ToyServer, open_page: Open) -> None:
    page = open_page(color_scheme="light", allowed=READBACK)
    (light,) = set(tile_kinds(page))
    page.emulate_media(color_scheme="dark")
    deadline = time.monotonic() + 5
    while light in tile_kinds(page):
        assert time.monotonic() < deadline, "a tile has kept its colour"


def test_of_a_large_pool_all_that_was_ever_held_is_shown(toy: ToyServer, open_page: Open) -> None:
    toy.llm = toy.app.state.async_llm = ToyLLM(num_blocks=20_001, max_num_batched_tokens=8192)
    toy.llm.add()
    toy.llm.step()
    page = open_page()
    expect(page, "#pool-rest").to_contain_text("more blocks, all free")
    page.focus("#mosaic")
    page.keyboard.press("End")
    last = int(page.text_content("#block").split()[1].rstrip(":"))
    assert page.text_content("#pool-rest") == f"and {20_000 - last:,} more blocks, all free"
    for _ in range(40):
        toy.llm.add(num_tokens=60, max_tokens=60)
    toy.llm.step()
    assert 20_000 - toy.llm.scheduler.block_pool.num_free_blocks > last, "the pool is hardly used"
    expect(page, "#sequences tr").to_have_count(41)
    page.keyboard.press("End")
    expect(page, "#block").to_contain_text("free")
    grown = int(page.text_content("#block").split()[1].rstrip(":"))
    assert grown > last
    assert page.text_content("#pool-rest") == f"and {20_000 - grown:,} more blocks, all free"
