"""Rows of a recipe's data sources, each with the place that an error names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tessera_cli.distill.data.row_files import PlacedRow, Row, json_lines, parquet_rows, text_parts
from tessera_cli.distill.data.row_hub import dataset_rows
from tessera_cli.errors import DataError
from tessera_cli.recipe.data_section import COLUMNS, TOOLS, DataSource

_SUFFIXES = (".jsonl", ".parquet", ".txt")


def check_source(source: DataSource) -> None:
    """See, as far as the disk can tell, that `source` is there and of a kind that `read_rows` knows.

    Raises:
        DataError: it is not.
    """
    if source.path is None:
        return
    path = Path(source.path)
    if path.suffix not in _SUFFIXES:
        raise DataError(
            f"{path} is none of {', '.join(_SUFFIXES)}",
            hint="write one JSON object a line to a .jsonl file; a hub id or a directory is a `dataset`",
        )
    if path.suffix == ".txt" and (source.columns or source.format not in ("text", "prompts")):
        raise DataError(
            f"{path} holds plain text, which has no columns",
            hint="use format text or prompts, or write a .jsonl file",
        )
    if not path.is_file():
        raise DataError(
            f"no such data file: {path}", hint="paths in a recipe are relative to the recipe's file"
        )


def read_rows(source: DataSource, *, streaming: bool = False) -> Iterator[PlacedRow]:
    """Yield the rows of `source`, with the columns of its format only, under the format's names.

    Values are what the file says, as they are: a text that looks like a date stays a text. `tools` is there
    where the row has it. With `streaming`, a dataset of the hub is not downloaded as a whole.

    Raises:
        DataError: no such file or dataset, another kind of file, no rows, a line that is not JSON, or a
            missing column.
    """
    check_source(source)
    is_empty = True
    for where, row in _rows(source, streaming):
        is_empty = False
        yield where, _renamed(row, where, source)
    if is_empty:
        raise DataError(f"{source.place} is empty")


def _rows(source: DataSource, streaming: bool) -> Iterator[PlacedRow]:
    if source.path is None:
        return dataset_rows(source, streaming=streaming)
    path = Path(source.path)
    if path.suffix == ".txt":
        (column,) = COLUMNS[source.format]
        return text_parts(path, column, source.sample_by or "line")
    return json_lines(path) if path.suffix == ".jsonl" else parquet_rows(path)


def _renamed(row: Row, where: str, source: DataSource) -> dict[str, Any]:
    wanted = list(COLUMNS[source.format])
    theirs = source.columns.get(TOOLS, TOOLS)
    # A column that the recipe names has to be there.
    if source.format != "text" and (TOOLS in source.columns or row.get(theirs) is not None):
        wanted.append(TOOLS)
    renamed = {}
    for column in wanted:
        name = source.columns.get(column, column)
        if name not in row:
            raise DataError(
                f"{where} has no column {name!r}, only {', '.join(sorted(row)) or 'an empty object'}",
                hint=f"format {source.format} needs {' and '.join(COLUMNS[source.format])}; "
                "`columns` says what the file calls them",
            )
        renamed[column] = row[name]
    return renamed
