"""What the live displays share: when to redraw in place, and how figures are laid out in few columns."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from tessera_cli.errors import UsageError

REFRESH_SECONDS = 0.25
MIN_WIDTH, MAX_WIDTH = 20, 80
LABEL_WIDTH = 11
BAR_WIDTH = 18
# C0, DEL and C1, whose U+009B begins a command as ESC [ does.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Glyphs:
    """The drawing characters, or their ASCII stand-ins where the terminal's encoding has only those."""

    full: str = "█"
    rest: str = "░"
    dot: str = "·"

    @classmethod
    def of(cls, console: Console) -> "Glyphs":
        return cls("#", "-", "|") if console.options.ascii_only else cls()


def wants_live(console: Console, choice: bool | None, *, no_progress: bool) -> bool:
    """Whether to redraw in place: `choice` of the user, else wherever `console` writes to a capable terminal.

    Raises:
        UsageError: --live is given where nothing can be redrawn.
    """
    # FORCE_COLOR makes rich call a pipe a terminal; only the file itself knows.
    can = console.file.isatty() and not console.is_dumb_terminal
    if choice and not can:
        raise UsageError(
            "--live needs a terminal on stderr that can move its cursor", hint="leave --live out: plain lines"
        )
    return can and not no_progress if choice is None else choice


def drawing_width(console: Console) -> int:
    """Columns of a live display: the console's but one, at most 79; never so few that nothing can be said."""
    return max(min(console.width, MAX_WIDTH) - 1, MIN_WIDTH)


def clock_text(seconds: float) -> str:
    """``mm:ss``, or ``h:mm:ss`` from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def without_controls(text: str) -> str:
    """`text` with its control characters but newline and tab as JSON writes them: none drives a terminal."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def key_values(**fields: object) -> str:
    """One line of ``key=value``; a value that has spaces is quoted, None is left out."""
    pairs = ((key, _plain(value)) for key, value in fields.items() if value is not None)
    return " ".join(f"{key}={value}" for key, value in pairs)


def rows(label: str, parts: Sequence[str], width: int) -> list[str]:
    """`parts` under a label, on as many lines of `width` columns as they need."""
    lines = [f" {label:<{LABEL_WIDTH}}{parts[0]}"]
    for part in parts[1:]:
        if len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f"   {part}"
        else:
            lines.append(" " * (LABEL_WIDTH + 1) + part)
    return [line[:width] for line in lines]


def bar(share: float, width: int, glyphs: "Glyphs") -> str:
    """A bar of `width` columns, `share` of it filled."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return glyphs.full * filled + glyphs.rest * (width - filled)


def _plain(value: object) -> str:
    text = str(value)
    return f'"{text}"' if " " in text else text
