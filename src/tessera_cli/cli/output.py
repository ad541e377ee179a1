"""The one sink: data to stdout, everything else to stderr, nothing through markup."""

import json
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TextIO

from tessera_cli.errors import RecipeError, TesseraError

if TYPE_CHECKING:
    from rich.console import Console


class OutputMode(StrEnum):
    """Who reads: a person, a program (one JSON document on stdout), or a person who wants results only."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


class Output:
    """Writes results and messages.

    Args:
        mode: in JSON mode `data` and `rows` write nothing and `document` is the result.
        quiet: notes are dropped, whatever the mode; quiet mode says the same.
        stdout: where results go; the process's by default.
        stderr: where everything else goes; the process's by default.
    """

    def __init__(
        self,
        mode: OutputMode = OutputMode.HUMAN,
        *,
        quiet: bool = False,
        stdout: TextIO | None = None,
        stderr: TextIO | None = None,
    ) -> None:
        self.mode = mode
        self.is_quiet = quiet or mode is OutputMode.QUIET
        self.stdout = sys.stdout if stdout is None else stdout
        self.stderr = sys.stderr if stderr is None else stderr

    @classmethod
    def of(cls, *, json: bool = False, quiet: bool = False) -> "Output":
        """The sink for a command's `--json` and `--quiet`."""
        return cls(OutputMode.JSON if json else OutputMode.HUMAN, quiet=quiet)

    @cached_property
    def console(self) -> "Console":
        """The console of live displays, on stderr; honours NO_COLOR, FORCE_COLOR, TERM and COLUMNS."""
        from rich.console import Console

        return Console(file=self.stderr, markup=False, highlight=False, emoji=False)

    def data(self, text: str, *, end: str = "\n") -> None:
        """Write a result, as it is."""
        if self.mode is not OutputMode.JSON:
            self.stdout.write(text + end)
            self.stdout.flush()

    def document(self, value: Any) -> None:
        """Write the result of a command as one JSON document, in JSON mode only."""
        if self.mode is OutputMode.JSON:
            self.stdout.write(to_json(value) + "\n")
            self.stdout.flush()

    def rows(self, rows: Iterable[Sequence[str]], *, header: Sequence[str] | None = None) -> None:
        """Write a result as aligned columns, two spaces apart."""
        for line in align(rows, header=header):
            self.data(line)

    def note(self, text: str) -> None:
        """Tell the user something that is not the result."""
        if not self.is_quiet:
            self._message(text)

    def warning(self, text: str) -> None:
        """Tell the user something to act on; shown in every mode."""
        self._message(f"warning: {text}")

    def error(self, error: TesseraError) -> None:
        """Write an error: on stdout as the JSON document in JSON mode, and always on stderr."""
        self.document(error_document(error))
        lines = [f"error: {error.message}"]
        if isinstance(error, RecipeError):
            lines += [f"  {problem}" for problem in error.problems]
        if error.hint is not None:
            lines += ["", f"hint: {error.hint}"]
        self._message("\n".join(lines))

    def _message(self, text: str) -> None:
        self.stdout.flush()
        self.stderr.write(text + "\n")
        self.stderr.flush()


def error_document(error: TesseraError) -> dict[str, Any]:
    """The error as `--json` shows it."""
    fields: dict[str, Any] = {
        "type": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
    }
    if isinstance(error, RecipeError):
        fields["problems"] = error.problems
    return {"error": fields}


def to_json(value: Any) -> str:
    """Strict JSON: paths as text, not-a-number refused."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str)


def align(rows: Iterable[Sequence[str]], *, header: Sequence[str] | None = None) -> list[str]:
    """Lines with every column but the last padded to its widest cell."""
    table = [list(row) for row in ([header, *rows] if header else rows)]
    widths = [max(map(len, column)) for column in zip_longest(*table, fillvalue="")]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]


def show(value: Any) -> str:
    """A figure for people: thousands grouped, short decimals."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(show(item) for item in value)
    return str(value)
