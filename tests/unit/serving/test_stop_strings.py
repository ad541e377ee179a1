"""Stop strings: the text ends before the first, however it is cut into pieces, and nothing else is lost."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tessera_cli.serving.stop_strings import StopStringWatcher

# Few letters, so that stop strings occur, overlap and begin without coming to their end.
TEXT = st.text("ab\n🚀", max_size=24)
STOPS = st.lists(st.text("ab\n🚀", min_size=1, max_size=5), max_size=4)
CUTS = st.lists(st.integers(0, 24), max_size=12)


def until_first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: read character by character; the longest stop string that ends first ends the text."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(one, len(text)) for one in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


@given(TEXT, STOPS, CUTS)
@example("xaab", ["aab"], [1, 2, 3])
@example("abab", ["bab", "ba"], [4])
@example("aaaab", ["aab", "aaaab"], [1, 2])
def test_any_pieces_give_the_text_before_the_first_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    watcher = StopStringWatcher(stops)
    shown = "".join(watcher.feed(piece) for piece in cut(text, cuts)) + watcher.finish()
    assert (shown, watcher.matched) == until_first_stop(text, stops)


@given(TEXT, STOPS, CUTS)
def test_what_is_shown_at_any_time_is_never_taken_back_and_holds_back_only_what_may_begin_a_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    watcher = StopStringWatcher(stops)
    whole, _ = until_first_stop(text, stops)
    shown = seen = ""
    for piece in cut(text, cuts):
        seen += piece
        shown += watcher.feed(piece)
        assert whole.startswith(shown)
        if watcher.matched is None:
            held = seen[len(shown) :]
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


@given(TEXT, TEXT, STOPS, CUTS)
def test_a_stop_string_counts_only_if_it_ends_where_it_may(
    early: str, late: str, stops: list[str], cuts: list[int]
) -> None:
    watcher = StopStringWatcher(stops)
    shown = "".join(watcher.feed(piece, may_stop=False) for piece in cut(early, cuts))
    shown += watcher.feed(late) + watcher.finish()
    text = early + late
    expected, matched = text, None
    for end in range(len(early) + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            matched = max(complete, key=len)
            expected = text[: end - len(matched)]
            break
    assert (shown, watcher.matched) == (expected, matched)


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["END"], ["so", " E", "N", "D", "ING"], ["so", " ", "", "", ""]),
        (["END"], ["so", " E", "N", "T"], ["so", " ", "", "ENT"]),
        (["\n\n"], ["a\n", "b\n", "\nc"], ["a", "\nb", ""]),
        (["🚀🚀"], ["🚀", "🚀"], ["", ""]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_only_a_proper_prefix_is_held_back(stops: list[str], pieces: list[str], shown: list[str]) -> None:
    watcher = StopStringWatcher(stops)
    assert [watcher.feed(piece) for piece in pieces] == shown


def test_a_stop_string_that_may_not_count_is_shown_at_once() -> None:
    watcher = StopStringWatcher(["ab"])
    assert watcher.feed("xab", may_stop=False) == "xab"
    assert watcher.feed("ab") == ""
    assert watcher.matched == "ab"
