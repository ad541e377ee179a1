"""Rows of local files, each with the place that an error names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tessera_cli.errors import DataError

Row = dict[str, Any]
PlacedRow = tuple[str, Row]


def json_lines(path: Path) -> Iterator[PlacedRow]:
    """The objects of a .jsonl file; blank lines are none.

    Raises:
        DataError: a line is not UTF-8, no JSON, or no object.
    """
    for number, line in _lines(path):
        where = f"{path} line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line.strip(), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            # What the parser calls a line is within ours.
            fault = f"{error.msg} at {error.colno}" if isinstance(error, json.JSONDecodeError) else error
            raise DataError(f"{where} is not JSON: {fault}", hint="write one object a line") from error
        if not isinstance(row, dict):
            raise DataError(f"{where} is not a JSON object", hint="write one object a line")
        yield where, row


def text_parts(path: Path, column: str, sample_by: str) -> Iterator[PlacedRow]:
    """The parts of a .txt file as rows of one `column`: its lines, its paragraphs, or the whole of it.

    Paragraphs have blank lines between them. Blank parts are none.

    Raises:
        DataError: a line is not UTF-8.
    """
    part: list[str] = []
    first = 1
    for number, line in _lines(path):
        ends = sample_by == "line" or (sample_by == "paragraph" and not line.strip())
        if ends and part:
            yield f"{path} line {first}", {column: "\n".join(part)}
            part = []
        if line.strip() or (part and sample_by == "document"):
            first = number if not part else first
            part.append(line)
    text = "\n".join(part).rstrip("\n")
    if text.strip():
        yield f"{path} line {first}", {column: text}


def parquet_rows(path: Path) -> Iterator[PlacedRow]:
    """The rows of a .parquet file.

    Raises:
        DataError: it cannot be read.
    """
    import datasets
    import pyarrow
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        # Not by `load_dataset`, to which a name with [, * or ? is a pattern of several files.
        with ParquetFile(path) as table:
            features = datasets.Features.from_arrow_schema(table.schema_arrow)
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", without_nulls(features.decode_example(row))
    except (OSError, UnicodeDecodeError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read after {number} rows: {str(error).splitlines()[0]}") from error


def without_nulls(row: Row) -> Row:
    """`row` without the empty keys inside its values.

    Arrow gives every object of a column the keys that any of them has, null where it has none.
    """
    return {column: _without_nulls(value) for column, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without their ends; only a newline separates two, for JSON may hold U+2028."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                # A byte-order mark is no part of the first line.
                yield number, _text(line, "utf-8-sig" if number == 1 else "utf-8", f"{path} line {number}")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _text(line: bytes, encoding: str, where: str) -> str:
    try:
        return line.decode(encoding).removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error.reason}") from error


def unique_keys(pairs: list[tuple[str, Any]]) -> Row:
    """An object that JSON spells; ValueError where a key is given twice, of which one would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("a key is given twice")
    return row
