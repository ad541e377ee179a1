"""How fast a running total grows, for the live displays."""

from collections import deque

WINDOW_SECONDS = 10.0


class Rate:
    """Units per second of a running total, over the last ten seconds."""

    def __init__(self, window: float = WINDOW_SECONDS) -> None:
        self.window = window
        self.points: deque[tuple[float, int]] = deque()

    def add(self, now: float, total: int) -> None:
        self.points.append((now, total))
        # One point at or before the window's edge stays, so that the whole window is covered.
        while len(self.points) > 1 and self.points[1][0] <= now - self.window:
            self.points.popleft()

    def value(self) -> float | None:
        """None while the points cover less than half a second, too little to say."""
        if not self.points:
            return None
        (start, first), (end, last) = self.points[0], self.points[-1]
        return (last - first) / (end - start) if end - start >= 0.5 else None
