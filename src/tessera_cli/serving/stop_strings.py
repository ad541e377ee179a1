"""Stop strings in text that comes in pieces: found wherever they are split, and never shown in part."""

from collections.abc import Sequence


class StopStringWatcher:
    """Passes text on up to the first stop string, holding back only what may turn out to begin one.

    The first is the one that is complete first as characters come, and of several complete at once the
    longest; so what is passed on does not depend on how the text is cut into pieces.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Watch for each of `stop`, none of them empty."""
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that `piece` makes safe to show; once `matched` is set, nothing more.

        Args:
            piece: the next of the text.
            may_stop: whether a stop string that ends within this piece counts.
        """
        if self.matched is not None:
            return ""
        text = self._held + piece
        match = self._first_match(text) if may_stop else None
        if match is not None:
            start, self.matched = match
            self._held = ""
            return text[:start]
        end = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[end:]
        return text[:end]

    def finish(self) -> str:
        """What is still held back, to be shown because no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Where the first stop string begins in `text`, and which it is.

        What was held back holds no match that counts: each has to end beyond it.
        """
        found = []
        for stop in self._stop:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`, the whole of it not counted."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
