"""How far a simulation is: one line on stderr, redrawn in place or now and then."""

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tessera_cli.cli.terminal import (
    BAR_WIDTH,
    REFRESH_SECONDS,
    Glyphs,
    bar,
    clock_text,
    drawing_width,
    key_values,
)
from tessera_cli.serving.simulator import Progress

_STEPS_BETWEEN_LOOKS = 64  # at the clock, which costs more than a step that is skipped


class SimulationView:
    """Shows a run; a context manager, fed by `on_progress`."""

    def __init__(
        self,
        console: Console,
        *,
        live: bool,
        log_interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.interval = REFRESH_SECONDS if live else log_interval
        self.clock = clock
        self.started = self.shown = clock()
        self.num_steps = 0
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=False, transient=True)
        self.is_live = live

    def __enter__(self) -> "SimulationView":
        if self.is_live:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.is_live:
            self.live.stop()

    def on_progress(self, progress: Progress) -> None:
        """Take the figures after a step; draws when it is time to."""
        self.num_steps += 1
        if self.num_steps % _STEPS_BETWEEN_LOOKS:
            return
        now = self.clock()
        if now - self.shown < self.interval:
            return
        self.shown = now
        if self.is_live:
            text = Text(self.line(progress), no_wrap=True, overflow="crop")
            self.live.update(text, refresh=True)
        else:
            self.console.out(self.plain_line(progress), highlight=False)

    def line(self, progress: Progress) -> str:
        glyphs = Glyphs.of(self.console)
        share = progress.completed / progress.num_prompts
        parts = [
            f" {bar(share, BAR_WIDTH, glyphs)} {progress.completed:,}/{progress.num_prompts:,}",
            f"simulated {clock_text(progress.seconds)}",
            f"{progress.num_running} running",
            f"{progress.num_waiting:,} waiting",
            f"KV {progress.kv_cache_usage:.0%}",
        ]
        return f" {glyphs.dot} ".join(parts)[: drawing_width(self.console)]

    def plain_line(self, progress: Progress) -> str:
        return key_values(
            elapsed=f"{self.clock() - self.started:.1f}",
            completed=f"{progress.completed}/{progress.num_prompts}",
            simulated_seconds=f"{progress.seconds:.1f}",
            running=progress.num_running,
            waiting=progress.num_waiting,
            preemptions=progress.preemptions,
            kv_cache_usage=f"{progress.kv_cache_usage:.3f}",
        )
