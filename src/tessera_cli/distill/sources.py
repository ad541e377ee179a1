"""Rows of a data file, read by `datasets`; every fault names the file and the line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from tessera_cli.errors import DataError

DataFormat = Literal["text", "messages", "prompt_completion"]

COLUMNS: dict[DataFormat, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
}
_BUILDERS = {".jsonl": "json", ".parquet": "parquet"}


def read_rows(path: Path, data_format: DataFormat, *, home: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `.jsonl` or `.parquet` file, with the columns of `data_format` only.

    `home` holds the cache of parsed files. Nothing is asked of the network.

    Raises:
        DataError: no such file, another kind of file, a line that is not JSON, or a missing column.
    """
    builder = _BUILDERS.get(path.suffix)
    if builder is None:
        raise DataError(
            f"{path} is neither .jsonl nor .parquet", hint="write one JSON object a line to a .jsonl file"
        )
    if not path.is_file():
        raise DataError(
            f"no such data file: {path}", hint="paths in a recipe are relative to the recipe's file"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    rows = _load(path, builder, home)
    missing = [column for column in COLUMNS[data_format] if column not in rows.column_names]
    if missing:
        raise DataError(
            f"{path} has no column {missing[0]!r}, only {', '.join(sorted(rows.column_names))}",
            hint=f"format {data_format} needs {' and '.join(COLUMNS[data_format])}",
        )
    yield from rows.select_columns(list(COLUMNS[data_format]))


def locate(path: Path, row: int) -> str:
    """Name row `row` (from 0) of a file for an error: its line where lines are rows."""
    if path.suffix != ".jsonl":
        return f"{path} row {row + 1}"
    with path.open("rb") as lines:
        numbers = (number for number, line in enumerate(lines, start=1) if line.strip())
        number = next((number for index, number in enumerate(numbers) if index == row), None)
    return f"{path} row {row + 1}" if number is None else f"{path} line {number}"


def _load(path: Path, builder: str, home: Path) -> Any:
    import datasets
    from datasets.exceptions import DatasetGenerationError

    with _quiet(datasets):
        try:
            return datasets.load_dataset(
                builder, data_files=str(path), split="train", cache_dir=str(home / "datasets")
            )
        except DatasetGenerationError as error:
            cause = error.__cause__ or error
            raise DataError(_bad_line(path) or f"{path} cannot be read: {_first_line(cause)}") from error


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Keep the library's progress bars and log lines off the user's terminal while it reads."""
    verbosity, bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()


def _bad_line(path: Path) -> str | None:
    """The first line that is not a JSON object, for a file that the reader refused."""
    if path.suffix != ".jsonl":
        return None
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line) if line.strip() else {}
            except ValueError as error:
                return f"{path} line {number} is not JSON: {_first_line(error)}"
            if not isinstance(value, dict):
                return f"{path} line {number} is not a JSON object"
    return None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
