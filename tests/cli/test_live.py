"""The live table: what it says, that it fits, and that a pipe gets plain lines."""

import io
from dataclasses import dataclass, field, replace

import pytest
from rich.console import Console

from tessera_cli.cli.live import EngineView
from tessera_cli.cli.rate import Rate
from tessera_cli.cli.terminal import Glyphs, bar, clock_text, key_values, rows, wants_live
from tessera_cli.engine.stats import EngineStats
from tessera_cli.errors import UsageError

IDLE = EngineStats(
    num_running=0,
    num_waiting=0,
    num_preemptions=2,
    num_finished=0,
    num_failed=0,
    num_blocks=512,
    num_used_blocks=0,
    block_size=16,
    prompt_tokens=1000,
    generation_tokens=500,
    num_steps=9,
    num_cached_blocks=7,
    prefix_cache_queries=1000,
    prefix_cache_hits=900,
)
BUSY = replace(
    IDLE,
    num_running=64,
    num_waiting=128,
    num_preemptions=5,
    num_used_blocks=366,
    num_cached_blocks=40,
    prompt_tokens=49_120,
    prefix_cache_queries=2000,
    prefix_cache_hits=1282,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass
class Times:
    ttft: float | None = 0.212
    tpot: float | None = 0.031
    itl: list[float] = field(default_factory=lambda: [0.030, 0.036])
    e2el: float | None = 4.12


def view(console: Console, clock: Clock, *, live: bool) -> EngineView:
    title = ["tessera bench", "a-student-with-a-long-name", "cpu float32"]
    return EngineView(console, live=live, title=title, num_requests=512, start=IDLE, clock=clock)


def fed(console: Console, *, live: bool) -> EngineView:
    clock = Clock()
    shown = view(console, clock, live=live)
    shown.on_step(replace(BUSY, prompt_tokens=1000, generation_tokens=500))
    clock.now = 10.0
    shown.on_finished([Times(), Times()])
    shown.on_finished([])
    shown.on_step(replace(BUSY, generation_tokens=19_840))
    clock.now = 42.0
    return shown


@pytest.mark.parametrize("width", [1, 5, 21])
def test_a_terminal_of_few_columns_gets_cropped_lines(width: int):
    text = fed(Console(file=io.StringIO(), width=width), live=False).render().plain
    assert max(map(len, text.split("\n"))) <= 20


@pytest.mark.parametrize("width", [40, 35])
def test_a_narrow_terminal_leaves_out_columns_and_cuts_no_number(width: int):
    text = fed(Console(file=io.StringIO(), width=width), live=False).render().plain
    assert max(map(len, text.split("\n"))) < width
    for figure in ("71.5%", "366/512 blocks", "p50", "212.0"):
        assert figure in text
    assert "p99" not in text


@pytest.mark.parametrize("width", [200, 80, 60])
def test_every_figure_is_there_and_no_line_is_wider_than_the_terminal(width: int):
    text = fed(Console(file=io.StringIO(), width=width), live=False).render().plain
    assert max(map(len, text.split("\n"))) < min(width, 80)
    for figure in ("running 64", "waiting 128", "preempted 3", "done 1/512", "failed 1", "71.5%"):
        assert figure in text
    for figure in ("cached 40", "prefix hit 38.2%"):
        assert figure in text
    for figure in ("366/512 blocks", "prompt 4,812", "gen 1,934", "generated 19,340", "00:42", "212.0"):
        assert figure in text


def test_an_ascii_terminal_gets_ascii():
    class Ascii(io.StringIO):
        encoding = "ascii"

    text = fed(Console(file=Ascii(), width=80), live=False).render().plain
    assert text.isascii()
    assert "#" in text


def test_names_with_brackets_are_shown_as_they_are():
    shown = EngineView(
        Console(file=io.StringIO()), live=False, title=["[red]m[/red]"], num_requests=1, start=IDLE
    )
    assert "[red]m[/red]" in shown.render().plain


def test_plain_lines_come_at_changes_of_state_and_every_interval():
    file, clock = io.StringIO(), Clock()
    with view(Console(file=file, width=40), clock, live=False) as shown:
        for step in range(121):
            clock.now = step / 10
            preemptions = 2 if step < 73 else 3
            shown.on_step(replace(BUSY, num_preemptions=preemptions, generation_tokens=500 + step))
    lines = file.getvalue().splitlines()
    states = [dict(pair.split("=", 1) for pair in line.split()) for line in lines]
    assert [fields.get("state") for fields in states] == ["started", None, "preempting", "done"]
    assert [fields["elapsed"] for fields in states] == ["0.0", "5.0", "7.3", "12.0"]
    assert states[1]["output_throughput"] == "10.0"
    assert states[3]["peak_kv_cache_usage"] == "0.715"
    assert (states[1]["cached_blocks"], states[1]["prefix_cache_hit_rate"]) == ("40", "0.382")
    assert not {"\x1b", "\r"} & set(file.getvalue())


def test_an_error_is_told_as_stopped():
    file = io.StringIO()
    with pytest.raises(KeyboardInterrupt), view(Console(file=file), Clock(), live=False):
        raise KeyboardInterrupt
    assert file.getvalue().startswith("state=stopped ")


def test_a_terminal_is_redrawn_four_times_a_second_and_keeps_the_last_frame():
    file, clock = Terminal(), Clock()
    console = Console(file=file, force_terminal=True, width=80, _environ={})
    with view(console, clock, live=True) as shown:
        before = file.getvalue().count("tokens/s")
        for step in range(1000):
            clock.now = step / 500
            shown.on_step(replace(BUSY, generation_tokens=step))
        frames = file.getvalue().count("tokens/s") - before
        clock.now = 2.0
    assert frames == 7
    assert "(in all)" in file.getvalue()[-900:]


def test_the_rate_slides_over_ten_seconds():
    rate = Rate()
    assert rate.value() is None
    for second in range(31):
        rate.add(float(second), 100 * min(second, 20))
    assert rate.value() == 0.0
    rate.add(31.0, 2500)
    assert rate.value() == pytest.approx(50.0)


def test_the_rate_says_nothing_from_a_moment():
    rate = Rate()
    rate.add(0.0, 0)
    rate.add(0.01, 64)
    assert rate.value() is None


@pytest.mark.parametrize(
    ("environ", "is_terminal", "no_progress", "expected"),
    [
        ({"TERM": "xterm"}, True, False, True),
        ({"TERM": "xterm"}, True, True, False),
        ({"TERM": "dumb"}, True, False, False),
        ({"TERM": "xterm", "FORCE_COLOR": "1"}, False, False, False),
    ],
)
def test_only_a_capable_terminal_is_redrawn(
    environ: dict[str, str], is_terminal: bool, no_progress: bool, expected: bool
):
    console = Console(file=Terminal() if is_terminal else io.StringIO(), _environ=environ)
    assert wants_live(console, None, no_progress=no_progress) is expected
    assert wants_live(console, False, no_progress=no_progress) is False


def test_asking_for_live_without_a_terminal_is_an_error():
    with pytest.raises(UsageError, match="--live"):
        wants_live(Console(file=io.StringIO()), True, no_progress=False)


def test_layout():
    assert clock_text(59.9) == "00:59"
    assert clock_text(3725) == "1:02:05"
    assert key_values(a=1, b=None, c="x y") == 'a=1 c="x y"'
    assert rows("a", ["one", "two", "three"], 24) == [" a          one   two", "            three"]
    assert [bar(share, 4, Glyphs("#", "-")) for share in (0.0, 0.5, 1.0)] == ["----", "##--", "####"]


def test_of_a_server_nothing_is_shown_that_its_clients_do_not_see() -> None:
    console, clock = Console(file=Terminal(), width=80, color_system=None), Clock()
    stats = replace(BUSY, num_blocks=0, num_used_blocks=0)
    shown = EngineView(console, live=True, title=["tessera bench"], num_requests=9, start=stats, clock=clock)
    shown.on_step(stats)
    table, line = shown.render().plain, shown.plain_line()
    for hidden in ("KV cache", "block", "preempt", "prefix"):
        assert hidden not in table
        assert hidden not in line
    assert "running 64   waiting 128   done 0/9" in table
    assert "kv_cache_usage" not in line
