"""The live panel of a distillation run on stderr, or ``key=value`` lines where nothing can be redrawn."""

import textwrap
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tessera_cli.cli.event_lines import event_line
from tessera_cli.cli.terminal import (
    BAR_WIDTH,
    MIN_WIDTH,
    REFRESH_SECONDS,
    Glyphs,
    bar,
    clock_text,
    drawing_width,
    key_values,
    rows,
)
from tessera_cli.distill.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Note,
    StageStarted,
    StudentAnswers,
    TrainStep,
)

LOG_SECONDS = 10.0


class TrainingView:
    """Shows a run; a context manager, fed by `on_event`.

    Args:
        console: where to draw; stderr in the program.
        live: redraw in place, else plain lines.
        header: what is trained from what, told once at the start, in order.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        console: Console,
        live: bool,
        header: Mapping[str, object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.header = header
        self.clock = clock
        self.started = self.shown = clock()
        self.stage: str | None = None
        self.train: TrainStep | None = None
        self.told: TrainStep | None = None
        self.first: tuple[float, int] | None = None
        self.evaluations: list[Evaluated] = []
        self.answers: StudentAnswers | None = None
        self.checkpoint: CheckpointSaved | None = None
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=False) if live else None

    def __enter__(self) -> "TrainingView":
        if self.live is None:
            if self.header:
                self._line(key_values(**self.header))
            return self
        width = max((len(key) for key in self.header), default=0)
        for key, value in self.header.items():
            indent = " " * (width + 3)
            line = f" {key:<{width}}  {value}"
            self._line(textwrap.fill(line, max(self.console.width - 1, MIN_WIDTH), subsequent_indent=indent))
        self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.live is not None:
            self.live.update(self.render(), refresh=True)
            self.live.stop()
            return
        self._tell_step()
        elapsed = f"{self.clock() - self.started:.1f}"
        self._line(key_values(state="done" if kind is None else "stopped", stage=self.stage, elapsed=elapsed))

    def on_event(self, event: Event) -> None:
        """Take one event of the run; draws when it is time to."""
        match event:
            case StageStarted(name):
                self._tell_step()
                self.stage = name
            case TrainStep():
                self._on_step(event)
                return
            case Evaluated():
                self._tell_step()
                self.evaluations.append(event)
            case StudentAnswers():
                self.answers = event
                return
            case CheckpointSaved():
                self.checkpoint = event
            case Note(text):
                self._line(text)
                return
        if self.live is None:
            self._line(event_line(event))
        else:
            self._draw()

    def _on_step(self, step: TrainStep) -> None:
        self.train = step
        now = self.clock()
        if self.first is None:
            self.first = (now - step.step_seconds, step.step - 1)
        if self.live is not None:
            if now - self.shown >= REFRESH_SECONDS:
                self._draw()
        elif self.told is None or step.step == step.num_steps or now - self.shown >= LOG_SECONDS:
            self._tell_step()

    def _tell_step(self) -> None:
        """In plain lines, tell the last step unless it is already told."""
        if self.live is None and self.train is not None and self.train is not self.told:
            self.told, self.shown = self.train, self.clock()
            self._line(event_line(self.train) + f" {key_values(eta=self._eta())}")
            if self.answers is not None:
                self._line(event_line(self.answers))
                self.answers = None

    def _draw(self) -> None:
        self.shown = self.clock()
        if self.live is not None:
            self.live.update(self.render(), refresh=True)

    def _line(self, text: str) -> None:
        # Text that a user or a model wrote never goes through rich's markup or highlighting.
        self.console.print(Text(text), soft_wrap=True)

    def _eta(self) -> str:
        """Time to the last step, at the pace of this process's own steps, evaluations included."""
        if self.train is None or self.first is None:
            return "-"
        start, before = self.first
        pace = (self.clock() - start) / (self.train.step - before)
        return clock_text(pace * (self.train.num_steps - self.train.step))

    def render(self) -> Text:
        """The panel, as wide as the console but at most 80 columns."""
        width = drawing_width(self.console)
        elapsed = clock_text(self.clock() - self.started)
        title = f" {'stage':<11}{self.stage or '-'}"
        lines = [f"{title:<{width - len(elapsed)}}{elapsed}"]
        if self.train is not None:
            for label, parts in self._train_sections(self.train).items():
                lines += rows(label, parts, width)
        if self.answers is not None:
            lines += rows("on-policy", _answer_parts(self.answers), width)
        if self.evaluations:
            lines += rows("held-out", self._evaluation_parts(), width)
        if self.checkpoint is not None:
            lines += rows("checkpoint", [f"step {self.checkpoint.step}", str(self.checkpoint.path)], width)
        return Text("\n".join(lines), no_wrap=True, overflow="crop")

    def _train_sections(self, train: TrainStep) -> dict[str, list[str]]:
        share = train.step / train.num_steps
        losses = [f"loss {train.loss:.4f}", f"kd {train.kd_loss:.4f}"]
        if train.ce_loss is not None:
            losses.append(f"ce {train.ce_loss:.4f}")
        if train.hidden_loss is not None:
            losses.append(f"hidden {train.hidden_loss:.4f}")
        return {
            "step": [
                f"{bar(share, BAR_WIDTH, Glyphs.of(self.console))}  {share:.0%}",
                f"{train.step:,}/{train.num_steps:,}",
                f"ETA {self._eta()}",
            ],
            "train": [*losses, f"lr {train.learning_rate:.2e}", f"grad norm {train.grad_norm:.2f}"],
            "speed": [
                f"{train.tokens_per_second:,.0f} tokens/s",
                f"supervised {train.supervised_tokens_per_second:,.0f}",
                *_utilisation(train),
                f"padding {train.padding_share:.1%}",
                f"peak {train.peak_memory_bytes / 2**30:.2f} GiB",
            ],
            "ms/step": [
                f"{train.step_seconds * 1000:,.0f}",
                f"teacher {train.teacher_seconds * 1000:,.0f}",
                f"student {train.student_seconds * 1000:,.0f}",
                f"loss {train.loss_seconds * 1000:,.0f}",
            ],
            "tokens": [f"{train.tokens:,}", f"supervised {train.supervised_tokens:,}"],
        }

    def _evaluation_parts(self) -> list[str]:
        first, last = self.evaluations[0], self.evaluations[-1]
        start = f" (start {first.kl:.4f})" if first.step == 0 < last.step else ""
        return [
            f"KL {last.kl:.4f}{start}",
            f"agreement {last.top1_agreement:.1%}",
            f"acceptance {last.acceptance:.1%}",
            f"step {last.step}",
        ]


def _answer_parts(answers: StudentAnswers) -> list[str]:
    return [
        f"{answers.num_answers:,} answers",
        f"{answers.num_cut:,} cut",
        f"{answers.num_tokens / answers.seconds:,.0f} tokens/s",
        f"step {answers.step:,}",
    ]


def _utilisation(train: TrainStep) -> list[str]:
    share = train.model_flops_utilisation
    return [] if share is None else [f"MFU {share:.0%}"]
