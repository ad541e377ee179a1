"""Where documents come from: text files, other names of columns, datasets."""

import errno
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError

from tessera_cli.distill.data.sources import read_rows
from tessera_cli.errors import DataError
from tessera_cli.recipe.data_section import DataSource

TEXT = "One line.\r\n  indented\n\n\nAfter a gap.\nIts second line.\n\n"


def rows(streaming: bool = False, **keys) -> list[dict]:
    return [row for _, row in read_rows(DataSource(**keys), streaming=streaming)]


def places(**keys) -> list[str]:
    return [where.rpartition("/")[2] for where, _ in read_rows(DataSource(**keys))]


@pytest.fixture
def text_file(tmp_path: Path) -> str:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    return str(tmp_path / "a.txt")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A directory as `datasets` loads it: two splits, nested objects of different keys."""
    path = tmp_path / "table"
    path.mkdir()
    for split, numbers in (("train", range(5)), ("validation", range(5, 7))):
        content = [{"q": f"Q{i}", "a": f"A{i}", "extra": i} for i in numbers]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path / f"{split}.parquet")
    return path


@pytest.mark.parametrize(
    ("sample_by", "parts", "lines"),
    [
        (None, ["One line.", "  indented", "After a gap.", "Its second line."], [1, 2, 5, 6]),
        ("line", ["One line.", "  indented", "After a gap.", "Its second line."], [1, 2, 5, 6]),
        ("paragraph", ["One line.\n  indented", "After a gap.\nIts second line."], [1, 5]),
        ("document", ["One line.\n  indented\n\n\nAfter a gap.\nIts second line."], [1]),
    ],
)
def test_a_text_file_is_cut_at_lines_paragraphs_or_not_at_all(text_file, sample_by, parts, lines):
    keys = {"path": text_file, "format": "text", "sample_by": sample_by}
    assert [row["text"] for row in rows(**keys)] == parts
    assert places(**keys) == [f"a.txt line {line}" for line in lines]


def test_lines_are_those_that_datasets_reads_without_the_blank_ones(tmp_path):
    (tmp_path / "a.txt").write_text("One.\n  two\n\nThree.\n\n")
    theirs = datasets.load_dataset("text", data_files=str(tmp_path / "a.txt"), split="train", streaming=True)
    ours = rows(path=str(tmp_path / "a.txt"), format="text")
    assert [row["text"] for row in ours] == [row["text"] for row in theirs if row["text"].strip()]


def test_a_line_of_text_can_be_a_prompt_and_nothing_with_columns(text_file):
    assert rows(path=text_file, format="prompts")[0] == {"prompt": "One line."}
    for keys in ({"format": "messages"}, {"format": "text", "columns": {"text": "body"}}):
        with pytest.raises(DataError, match="holds plain text, which has no columns"):
            rows(path=text_file, **keys)


def test_a_blank_text_file_is_empty(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\n")
    for sample_by in ("line", "paragraph", "document"):
        with pytest.raises(DataError, match="is empty"):
            rows(path=str(tmp_path / "a.txt"), format="text", sample_by=sample_by)


def test_bytes_of_a_text_file_that_are_not_utf_8_are_named_by_their_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(DataError, match=r"a\.txt line 2 is not UTF-8"):
        rows(path=str(tmp_path / "a.txt"), format="text")


def test_columns_may_have_other_names(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"instruction": "Q", "output": "A", "prompt": "no"}))
    keys = {"path": str(tmp_path / "a.jsonl"), "format": "prompt_completion"}
    assert rows(**keys, columns={"prompt": "instruction", "completion": "output"}) == [
        {"prompt": "Q", "completion": "A"}
    ]
    with pytest.raises(DataError, match="has no column 'completion', only instruction, output, prompt"):
        rows(**keys, columns={"prompt": "instruction"})
    with pytest.raises(DataError, match="line 1 has no column 'functions'"):
        rows(
            **keys,
            columns={"prompt": "instruction", "completion": "output", "tools": "functions"},
        )


@pytest.mark.parametrize("name", ["a[12]", "a*", "a?", "a::b", "a#%41 b"])
def test_the_name_of_a_parquet_file_is_no_pattern(tmp_path, name):
    for other, text in (("a1", "another"), (name, "its own")):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist([{"text": text}]), tmp_path / f"{other}.parquet"
        )
    assert rows(path=str(tmp_path / f"{name}.parquet"), format="text") == [{"text": "its own"}]


def test_columns_that_datasets_writes_as_json_into_parquet_are_read_as_objects(tmp_path):
    written = [
        {"messages": [{"role": "user", "content": "a"}], "tools": [{"x": {"first": 1}}]},
        {
            "messages": [{"role": "assistant", "content": "b", "tool_calls": [{"y": "c"}]}],
            "tools": [{"x": {"second": [1, "2"]}}],
        },
    ]
    table = datasets.Dataset.from_list(written, on_mixed_types="use_json")
    assert "Json" in str(table.features)
    table.to_parquet(tmp_path / "a.parquet")
    assert rows(path=str(tmp_path / "a.parquet"), format="messages") == written


def test_a_parquet_file_without_rows_is_empty_and_text_in_it_is_utf_8(tmp_path, capfd):
    file = tmp_path / "a.parquet"
    broken = pyarrow.Array.from_buffers(
        pyarrow.string(),
        1,
        [None, pyarrow.array([0, 1], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"\xff")],
    )
    for column, message in (
        (pyarrow.array([], pyarrow.string()), "is empty"),
        (broken, "cannot be read after 0 rows: .utf-8"),
    ):
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
        with pytest.raises(DataError, match=message):
            rows(path=str(file), format="text")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet"])
def test_a_file_that_may_not_be_read_is_told(tmp_path, monkeypatch, name):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / name).write_text("a")
    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(pyarrow.parquet, "ParquetFile", refuse)
    with pytest.raises(DataError, match=rf"{name} cannot be read.*Permission denied"):
        rows(path=str(tmp_path / name), format="text")


def test_a_directory_is_a_dataset_with_splits(table):
    keys = {
        "dataset": str(table),
        "format": "prompt_completion",
        "columns": {"prompt": "q", "completion": "a"},
    }
    assert rows(**keys) == [{"prompt": f"Q{i}", "completion": f"A{i}"} for i in range(5)]
    assert rows(**keys, split="validation") == [{"prompt": f"Q{i}", "completion": f"A{i}"} for i in (5, 6)]
    assert rows(**keys) == rows(**keys, streaming=True)
    assert places(**keys)[1] == "table (train) row 2"


def test_a_changed_directory_is_read_again(table):
    keys = {"dataset": str(table), "format": "text", "columns": {"text": "q"}}
    before = rows(**keys)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"q": "new"}]), table / "train.parquet")
    assert rows(**keys) == [{"text": "new"}] != before


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split": "test"}, r"table \(test\) cannot be read after 0 rows: .*test.*train"),
        ({"name": "other"}, "other"),
        ({"format": "messages"}, r"table \(train\) row 1 has no column 'messages'"),
    ],
)
def test_what_a_dataset_does_not_have_is_named(table, keys, message):
    with pytest.raises(DataError, match=message):
        rows(**{"dataset": str(table), "format": "text"} | keys)


def test_an_empty_directory_is_no_dataset(tmp_path):
    with pytest.raises(DataError, match="cannot be read after 0 rows") as caught:
        rows(dataset=str(tmp_path), format="text")
    assert "load_dataset" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("script.py", b"x = 1"),  # RuntimeError
        ("train.jsonl", b""),  # StopIteration within `datasets`
        ("train.jsonl", b'{"text": "a"'),
        ("train.csv", b"text\n\xe9\n"),
        ("train.zip", b"PK"),
        ("README.md", b"---\n: [\n---\n"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_directory_that_datasets_cannot_read_is_told_whatever_it_raises(tmp_path, name, content, streaming):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read after 0 rows: .+"):
        rows(dataset=str(tmp_path), format="text", streaming=streaming)


def test_a_dataset_of_the_hub_is_asked_for_by_its_name_split_and_revision(monkeypatch):
    asked = {}

    def load_dataset(path, **keys):
        asked.update(keys, path=path)
        return iter([{"text": "a"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    keys = {"dataset": "org/set", "name": "en", "split": "train[:5]", "revision": "v1", "format": "text"}
    assert rows(**keys) == [{"text": "a"}]
    wanted = {"path": "org/set", "name": "en", "split": "train[:5]", "revision": "v1", "streaming": False}
    assert asked == wanted
    rows(streaming=True, **keys)
    assert asked == wanted | {"streaming": True}


def test_offline_a_dataset_that_was_not_downloaded_is_told(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"org/none \(train\) cannot be read after 0 rows: Couldn't reach"
    ) as caught:
        rows(dataset="org/none", format="text")
    assert "offline" in caught.value.hint


def test_a_connection_that_breaks_names_the_rows_that_came(monkeypatch):
    def broken():
        yield {"text": "a"}
        raise ConnectionError("reset by peer\nmore")

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: broken())
    with pytest.raises(DataError, match=r"cannot be read after 1 rows: reset by peer$"):
        rows(dataset="org/set", format="text")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "exactly one of path, dataset"),
        ({"path": "a.jsonl", "dataset": "org/set"}, "exactly one of path, dataset"),
        ({"path": "a.jsonl", "split": "train"}, "only `dataset` has it"),
        ({"path": "a.jsonl", "revision": "main"}, "only `dataset` has it"),
        ({"path": "a.jsonl", "columns": {"prompt": "q"}}, "format text has no column 'prompt', only text"),
        ({"path": "a.jsonl", "sample_by": "line"}, "only a .txt file can be cut"),
        ({"path": "a.jsonl", "written_by": "teacher"}, "only `format: prompts` leaves something to write"),
        ({"path": "a.jsonl", "sampling": {"seed": 1}}, "only `written_by: teacher` draws anything"),
    ],
)
def test_keys_without_a_meaning_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        DataSource(**{"format": "text"} | keys)
