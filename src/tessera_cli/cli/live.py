"""The live table of the engine: requests, KV cache, throughput and latencies, on stderr.

On a terminal it is redrawn in place four times a second and stays on the screen at the end. Anywhere else it
is one ``key=value`` line every few seconds and at changes of state, without control characters.
"""

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tessera_cli.cli.rate import WINDOW_SECONDS, Rate
from tessera_cli.cli.terminal import (
    BAR_WIDTH,
    LABEL_WIDTH,
    REFRESH_SECONDS,
    Glyphs,
    bar,
    clock_text,
    drawing_width,
    key_values,
    rows,
)
from tessera_cli.engine.stats import EngineStats, percentile
from tessera_cli.serving.benchmark_result import SampleTimes

PERCENTILES = (50, 90, 99)


class EngineView:
    """Shows an engine at work; a context manager, fed by `on_step` and `on_finished`.

    Without KV blocks it is a server somewhere, of which nothing is shown that its clients do not see.

    Args:
        console: where to draw; stderr in the program.
        live: redraw in place, else plain lines.
        title: what runs, for the first line, such as ["tessera bench", "student-60m", "cpu float32"].
        num_requests: how many requests there are in all.
        start: the engine's figures before the first of them; counts are told from there.
        log_interval: seconds between plain lines.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        *,
        live: bool,
        title: Sequence[str],
        num_requests: int,
        start: EngineStats,
        log_interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.title = list(title)
        self.num_requests = num_requests
        self.interval = REFRESH_SECONDS if live else log_interval
        self.clock = clock
        self.started = self.shown = clock()
        self.start = self.stats = start
        self.has_started = False
        self.ended: float | None = None
        self.peak_used_blocks = start.num_used_blocks
        self.num_done = 0
        self.num_failed = 0
        self.prompt_rate, self.generation_rate = Rate(), Rate()
        self.prompt_rate.add(self.started, start.prompt_tokens)
        self.generation_rate.add(self.started, start.generation_tokens)
        self.seconds: dict[str, list[float]] = {"TTFT": [], "TPOT": [], "ITL": [], "E2EL": []}
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=False) if live else None

    def __enter__(self) -> "EngineView":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ended = self.clock()
        self._show(state="done" if kind is None else "stopped")
        if self.live is not None:
            self.live.stop()

    def on_step(self, stats: EngineStats) -> None:
        """Take the engine's figures after a step; draws when it is time to."""
        now = self.clock()
        preempts = self.num_preemptions == 0 and stats.num_preemptions > self.start.num_preemptions
        state = "preempting" if preempts else None if self.has_started else "started"
        self.has_started, self.stats = True, stats
        self.peak_used_blocks = max(self.peak_used_blocks, stats.num_used_blocks)
        self.prompt_rate.add(now, stats.prompt_tokens)
        self.generation_rate.add(now, stats.generation_tokens)
        if now - self.shown >= self.interval or (state is not None and self.live is None):
            self._show(state=state)

    @property
    def num_preemptions(self) -> int:
        return self.stats.num_preemptions - self.start.num_preemptions

    @property
    def generation_tokens(self) -> int:
        return self.stats.generation_tokens - self.start.generation_tokens

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """The share of prompt tokens looked up in the prefix cache that were there; None before any was."""
        queries = self.stats.prefix_cache_queries - self.start.prefix_cache_queries
        hits = self.stats.prefix_cache_hits - self.start.prefix_cache_hits
        return hits / queries if queries else None

    def _rates(self) -> tuple[float | None, float | None, str]:
        """Prompt and generated tokens per second, and over what: at the end over the whole.

        A server counts the tokens of a request at its end, so a few seconds of it would show all or nothing.
        """
        if self.ended is None and self.stats.num_blocks:
            return self.prompt_rate.value(), self.generation_rate.value(), f"last {WINDOW_SECONDS:.0f} s"
        seconds = max((self.clock() if self.ended is None else self.ended) - self.started, 1e-9)
        over = "completed" if self.ended is None else "in all"
        num_prompt = self.stats.prompt_tokens - self.start.prompt_tokens
        return num_prompt / seconds, self.generation_tokens / seconds, over

    def _blocks(self) -> tuple[int, str]:
        """Blocks in use; at the end, when none is, the most that were."""
        if self.ended is None:
            return self.stats.num_used_blocks, ""
        return self.peak_used_blocks, "peak "

    def on_finished(self, samples: Sequence[SampleTimes]) -> None:
        """Count a finished request with the times of its samples; none for one that failed."""
        if not samples:
            self.num_failed += 1
            return
        self.num_done += 1
        for latencies in samples:
            for name, value in (("TTFT", latencies.ttft), ("TPOT", latencies.tpot), ("E2EL", latencies.e2el)):
                if value is not None:
                    self.seconds[name].append(value)
            self.seconds["ITL"].extend(latencies.itl)

    def _show(self, state: str | None) -> None:
        self.shown = self.clock()
        if self.live is not None:
            self.live.update(self.render(), refresh=True)
        else:
            self.console.out(self.plain_line(state), highlight=False)

    def render(self) -> Text:
        """The table, as wide as the console but at most 80 columns."""
        glyphs, width = Glyphs.of(self.console), drawing_width(self.console)
        lines = [self._title_line(glyphs, width), *self._engine_lines(glyphs, width)]
        lines += self._latency_lines(width)
        return Text("\n".join(lines), no_wrap=True, overflow="crop")

    def plain_line(self, state: str | None = None) -> str:
        """The same figures as one line of ``key=value``, with the names of the JSON."""
        stats, (prompt_rate, output_rate, _), (used, peak) = self.stats, self._rates(), self._blocks()
        usage = "peak_kv_cache_usage" if peak else "kv_cache_usage"
        hit_rate = self.prefix_cache_hit_rate
        cache = {
            "preemptions": self.num_preemptions,
            usage: f"{used / max(1, stats.num_blocks):.3f}",
            "cached_blocks": stats.num_cached_blocks,
            "prefix_cache_hit_rate": None if hit_rate is None else f"{hit_rate:.3f}",
        }
        fields: dict[str, object] = {
            "state": state,
            "elapsed": f"{self.clock() - self.started:.1f}",
            "completed": f"{self.num_done}/{self.num_requests}",
            "failed": self.num_failed,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            **(cache if stats.num_blocks else {}),
            "prompt_throughput": None if prompt_rate is None else f"{prompt_rate:.1f}",
            "output_throughput": None if output_rate is None else f"{output_rate:.1f}",
            "total_output_tokens": self.generation_tokens,
        }
        for name, values in self.seconds.items():
            if values and name in ("TTFT", "TPOT"):
                fields[f"p50_{name.lower()}_ms"] = f"{_milliseconds(values, 50):.1f}"
        return key_values(**fields)

    def _title_line(self, glyphs: Glyphs, width: int) -> str:
        elapsed = clock_text(self.clock() - self.started)
        block = [f"block {self.stats.block_size}"] if self.stats.num_blocks else []
        parts = [*self.title, *block]
        title, room = f" {glyphs.dot} ".join(parts), width - len(elapsed) - 2
        return f" {title[:room]:<{room}} {elapsed}"

    def _engine_lines(self, glyphs: Glyphs, width: int) -> list[str]:
        stats, (prompt_rate, output_rate, over), (used, peak) = self.stats, self._rates(), self._blocks()
        usage, hit_rate = used / max(1, stats.num_blocks), self.prefix_cache_hit_rate
        # On a narrow terminal the bar gives way to the figure beside it, whose digits must not be cut.
        bar_width = max(0, min(BAR_WIDTH, width - LABEL_WIDTH - 1 - len("  peak 100.0%")))
        sections = {
            "requests": [
                f"running {stats.num_running}",
                f"waiting {stats.num_waiting}",
                f"preempted {self.num_preemptions}",
                f"done {self.num_done}/{self.num_requests}",
                f"failed {self.num_failed}",
            ],
            "KV cache": [
                f"{bar(usage, bar_width, glyphs)}  {peak}{usage:.1%}",
                f"{used:,}/{stats.num_blocks:,} blocks",
                f"cached {stats.num_cached_blocks:,}"
                f"  prefix hit {'-' if hit_rate is None else f'{hit_rate:.1%}'}",
            ],
            "tokens/s": [
                f"prompt {_rate(prompt_rate)}",
                f"gen {_rate(output_rate)}  ({over})",
                f"generated {self.generation_tokens:,}",
            ],
        }
        if not stats.num_blocks:
            del sections["KV cache"], sections["requests"][2]
        return [line for label, parts in sections.items() for line in rows(label, parts, width)]

    def _latency_lines(self, width: int) -> list[str]:
        if not any(self.seconds.values()):
            return []
        # Columns that do not fit are left out: a number without its last digits would be another one.
        percentiles = PERCENTILES[: max(1, (width - LABEL_WIDTH) // 10)]
        lines = [" latency ms" + "".join(f"{f'p{percent}':>10}" for percent in percentiles)]
        for name, values in self.seconds.items():
            cells = (f"{_milliseconds(values, percent):,.1f}" if values else "-" for percent in percentiles)
            lines.append(f"   {name:<8}" + "".join(f"{cell:>10}" for cell in cells))
        return [line[:width] for line in lines]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _milliseconds(values: list[float], percent: float) -> float:
    # Sorted in place: what came since the last call is merged in, instead of sorting all gaps anew.
    values.sort()
    return percentile(values, percent) * 1000
