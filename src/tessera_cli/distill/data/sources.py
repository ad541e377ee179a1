"""Rows of a data file, each with the place that an error names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tessera_cli.errors import DataError

DataFormat = Literal["text", "messages", "prompt_completion"]
Row = dict[str, Any]
PlacedRow = tuple[str, Row]

COLUMNS: dict[DataFormat, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
}


def check_file(path: Path) -> None:
    """See that `path` is there and of a kind that `read_rows` knows.

    Raises:
        DataError: it is not.
    """
    if path.suffix not in (".jsonl", ".parquet"):
        raise DataError(
            f"{path} is neither .jsonl nor .parquet", hint="write one JSON object a line to a .jsonl file"
        )
    if not path.is_file():
        raise DataError(
            f"no such data file: {path}", hint="paths in a recipe are relative to the recipe's file"
        )


def read_rows(path: Path, data_format: DataFormat) -> Iterator[PlacedRow]:
    """Yield the rows of a `.jsonl` or `.parquet` file, with the columns of `data_format` only.

    Values are what the file says, as they are: a text that looks like a date stays a text.

    Raises:
        DataError: no such file, another kind of file, no rows, a line that is not JSON, or a missing column.
    """
    check_file(path)
    is_empty = True
    for where, row in _json_lines(path) if path.suffix == ".jsonl" else _parquet_rows(path):
        is_empty = False
        yield where, {column: _value(row, column, where, data_format) for column in COLUMNS[data_format]}
    if is_empty:
        raise DataError(f"{path} is empty")


def _json_lines(path: Path) -> Iterator[PlacedRow]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path} line {number}"
            try:
                # A byte-order mark is no part of the first line.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                row = json.loads(text.strip(), object_pairs_hook=_unique_keys)
            except UnicodeDecodeError as error:
                raise DataError(f"{where} is not UTF-8: {error.reason}") from error
            except (ValueError, RecursionError) as error:
                # What the parser calls a line is within ours.
                fault = f"{error.msg} at {error.colno}" if isinstance(error, json.JSONDecodeError) else error
                raise DataError(f"{where} is not JSON: {fault}", hint="write one object a line") from error
            if not isinstance(row, dict):
                raise DataError(f"{where} is not a JSON object", hint="write one object a line")
            yield where, row


def _parquet_rows(path: Path) -> Iterator[PlacedRow]:
    import datasets
    import pyarrow

    number = 0
    try:
        # Streamed, so nothing is cached: a cache would be keyed by name and time, not by content.
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for row in rows:
            number += 1
            yield f"{path} row {number}", row
    except (OSError, pyarrow.ArrowException, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{path} cannot be read after {number} rows: {str(error).splitlines()[0]}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key is given twice")
    return row


def _value(row: Row, column: str, where: str, data_format: DataFormat) -> Any:
    if column not in row:
        raise DataError(
            f"{where} has no column {column!r}, only {', '.join(sorted(row)) or 'an empty object'}",
            hint=f"format {data_format} needs {' and '.join(COLUMNS[data_format])}",
        )
    return row[column]
