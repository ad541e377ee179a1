"""Documents: what is supervised, what is left out, what is an error."""

import json
import os
import socket
from copy import copy
from pathlib import Path

import pytest

from tessera_cli.distill.data.corpus import Corpus, Document, build_batch, load_corpus
from tessera_cli.distill.data.sources import read_rows
from tessera_cli.errors import DataError, ModelError
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.data_section import DataSource

QUESTION = {"role": "user", "content": "What is the capital of France?"}
ANSWER = {"role": "assistant", "content": "The capital of France is Paris."}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(tiny_model_dir)


@pytest.fixture
def load(tokenizer: Tokenizer, tmp_path: Path):
    def load(rows: list, data_format: str, *, train_on="completion", max_seq_len=200) -> Corpus:
        file = tmp_path / "data.jsonl"
        lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        source = DataSource(path=str(file), format=data_format)
        return load_corpus([source], tokenizer, max_seq_len=max_seq_len, train_on=train_on)

    return load


def text_source(file: Path) -> DataSource:
    return DataSource(path=str(file), format="text")


def supervised_text(document: Document, tokenizer: Tokenizer) -> str:
    return tokenizer.decode(document.token_ids[document.supervised].tolist(), skip_special_tokens=False)


def test_only_the_answers_and_their_end_marker_are_supervised(load, tokenizer):
    document = load([{"messages": [QUESTION, ANSWER, QUESTION, ANSWER]}], "messages").documents[0]
    assert supervised_text(document, tokenizer) == 2 * (ANSWER["content"] + "<|im_end|>")
    assert document.token_ids.tolist() == tokenizer.encode_chat(
        [QUESTION, ANSWER, QUESTION, ANSWER], add_generation_prompt=False
    )


def test_padding_that_equals_the_end_token_does_not_unsupervise_it(load, tokenizer):
    assert tokenizer.pad_token_id in tokenizer.eos_token_ids
    document = load([{"messages": [QUESTION, ANSWER]}], "messages").documents[0]
    assert document.token_ids[document.supervised][-1] in tokenizer.eos_token_ids


def test_a_trained_prompt_is_the_prompt_that_generation_gives(load, tokenizer):
    document = load([{"messages": [QUESTION, ANSWER]}], "messages").documents[0]
    prompt = tokenizer.encode_chat([QUESTION], add_generation_prompt=True)
    assert document.token_ids[: len(prompt)].tolist() == prompt
    assert not document.supervised[: len(prompt)].any()
    assert document.supervised[len(prompt)]


def test_every_token_but_the_first_is_supervised_with_train_on_all(load):
    for row, data_format in (
        ({"messages": [QUESTION, ANSWER]}, "messages"),
        ({"text": "A text."}, "text"),
        ({"prompt": "A", "completion": " text."}, "prompt_completion"),
    ):
        document = load([row], data_format, train_on="all").documents[0]
        assert not document.supervised[0]
        assert document.supervised[1:].all()


def test_plain_documents_end_with_the_end_token(load, tokenizer):
    text = load([{"text": "A text."}], "text").documents[0]
    pair = load([{"prompt": "What is", "completion": " a text."}], "prompt_completion").documents[0]
    assert text.token_ids.tolist() == [*tokenizer.encode("A text."), tokenizer.eos_token_ids[0]]
    assert pair.token_ids.tolist() == [*tokenizer.encode("What is a text."), tokenizer.eos_token_ids[0]]
    assert supervised_text(pair, tokenizer) == " a text.<|im_end|>"


def test_conversational_prompt_and_completion_are_one_conversation(load, tokenizer):
    row = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}
    document = load([row], "prompt_completion").documents[0]
    assert supervised_text(document, tokenizer) == ANSWER["content"] + "<|im_end|>"


def test_long_documents_are_left_out_whole_and_counted(load):
    rows = [{"text": "word " * n} for n in (2, 90, 3)]
    corpus = load(rows, "text", max_seq_len=50)
    assert len(corpus.documents) == 2
    assert corpus.intake.num_too_long == 1
    assert "1 of 3 documents are longer" in corpus.notes("data.train")[0]


def test_documents_without_a_target_are_counted_and_nothing_else_is_an_error(load):
    corpus = load([{"messages": [QUESTION]}, {"messages": [QUESTION, ANSWER]}], "messages")
    assert corpus.intake.num_unsupervised == 1
    with pytest.raises(DataError, match="nothing to learn from"):
        load([{"messages": [QUESTION]}], "messages")
    with pytest.raises(DataError, match="1 documents are longer"):
        load([{"text": "word " * 50}], "text", max_seq_len=10)


@pytest.mark.parametrize(
    ("rows", "data_format", "message"),
    [
        ([{"text": "a"}, "", '{"text": '], "text", "line 3 is not JSON"),
        ([{"text": "a"}, "[1]"], "text", "line 2 is not a JSON object"),
        ([{"text": "a"}, "", {"text": ""}], "text", "line 3: `text` is empty"),
        ([{"text": "a"}, {"text": 3}], "text", "line 2: `text` is 3"),
        ([{"text": "a"}, {"other": "b"}], "text", "line 2 has no column 'text', only other"),
        ([{"text": None}], "text", "line 1: `text` is missing"),
        ([{}], "text", "line 1 has no column 'text', only an empty object"),
        ([{"text": "a"}, "null"], "text", "line 2 is not a JSON object"),
        (['{"text": "a"} {"text": "b"}'], "text", "line 1 is not JSON: Extra data at 15"),
        (['{"text": "a", "text": "b"}'], "text", "line 1 is not JSON: a key is given twice"),
        (["[" * 10**5], "text", "line 1 is not JSON: maximum recursion"),
        (
            [{"text": "a"}, '{"text": "a\\ud800"}'],
            "text",
            "line 2: `text` has half of a surrogate pair at .* 2",
        ),
        (["", " "], "text", "data.jsonl is empty"),
        ([{"body": "a"}], "text", "no column 'text', only body"),
        ([{"messages": []}], "messages", "line 1: `messages` is empty"),
        ([{"messages": [{"role": "bot", "content": "a"}]}], "messages", "role` is 'bot'"),
        ([{"messages": [{"role": "user"}]}], "messages", r"messages\[0\].content` is missing"),
        ([{"messages": [QUESTION | {"name": "x"}]}], "messages", "has the key 'name'"),
    ],
)
def test_a_bad_row_is_named_by_its_line(load, rows, data_format, message):
    with pytest.raises(DataError, match=message):
        load(rows, data_format)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xef\xbb\xbf" + b'{"text": "a"}\r\n\r\n{"text": "b"}', ["a", "b"]),
        ('{"text": "a\u2028b\x85c"}\n'.encode(), ["a\u2028b\x85c"]),
        (b'{"text": "2024-01-01"}\n{"text": "2024-01-02 10:00:00"}', ["2024-01-01", "2024-01-02 10:00:00"]),
        (b'{"text": "a", "n": 1}\n{"text": "b", "n": [NaN]}', ["a", "b"]),
        (b'{"text": "{\\"a\\": null}"}', ['{"a": null}']),
    ],
    ids=["byte-order mark and CRLF", "line separators", "dates", "other columns", "JSON in a text"],
)
def test_text_is_read_as_it_stands(content, expected, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    rows = [row for _, row in read_rows(text_source(tmp_path / "a.jsonl"))]
    assert rows == [{"text": text} for text in expected]


def test_bytes_that_are_not_utf_8_are_named_by_their_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl line 2 is not UTF-8"):
        list(read_rows(text_source(tmp_path / "a.jsonl")))


def test_an_empty_answer_is_only_its_end_marker(load, tokenizer):
    for content in ("", "  "):
        corpus = load([{"messages": [QUESTION, {"role": "assistant", "content": content}]}], "messages")
        assert supervised_text(corpus.documents[0], tokenizer) == content + "<|im_end|>"


def test_a_file_that_changed_within_the_same_time_stamp_is_read_again(tmp_path):
    file = tmp_path / "a.jsonl"
    for text in ("one", "two"):
        file.write_text(json.dumps({"text": text}))
        os.utime(file, (10**9, 10**9))
        assert [row for _, row in read_rows(text_source(file))] == [{"text": text}]


def test_a_file_that_is_missing_empty_or_of_another_kind_is_an_error(tokenizer, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.csv").write_text("text\na\n")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1nothing")
    faults = {
        "no.jsonl": "no such data file",
        "empty.jsonl": "is empty",
        "a.csv": "is none of .jsonl, .parquet, .txt",
        "bad.parquet": r"bad\.parquet cannot be read",
    }
    for name, message in faults.items():
        source = DataSource(path=str(tmp_path / name), format="text")
        with pytest.raises(DataError, match=message):
            load_corpus([source], tokenizer, max_seq_len=10, train_on="all")


def test_an_answer_that_merges_with_its_prompt_is_an_error(load, tokenizer):
    assert tokenizer.encode("he") != tokenizer.encode("h") + tokenizer.encode("e")
    with pytest.raises(DataError, match=r"line 1: no token boundary between 'h' and 'e'"):
        load([{"prompt": "h", "completion": "e"}], "prompt_completion")


def test_a_template_that_rewrites_the_past_is_an_error(tiny_model_dir, tmp_path, monkeypatch):
    rewriting = Tokenizer.from_dir(tiny_model_dir)
    render = rewriting.render_chat
    monkeypatch.setattr(rewriting, "render_chat", lambda m, **k: f"{len(m)} messages\n" + render(m, **k))
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [QUESTION, ANSWER]}) + "\n")
    source = DataSource(path=str(tmp_path / "a.jsonl"), format="messages")
    with pytest.raises(DataError, match="changes what precedes message 2") as caught:
        load_corpus([source], rewriting, max_seq_len=99, train_on="completion")
    assert "`data.train_on: all`" in caught.value.hint
    corpus = load_corpus([source], rewriting, max_seq_len=99, train_on="all")
    assert corpus.documents[0].supervised[1:].all()


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", DataError, "line 2: .* roles must alternate"),
        ("{{ messages[1]['content']['x']['y'] }}", ModelError, "line 2: the chat template .* fails"),
    ],
)
def test_a_conversation_that_a_template_refuses_is_named_by_its_line(
    tokenizer, tmp_path, template, error, message
):
    picky = copy(tokenizer)
    vars(picky).pop("_template", None)
    picky.chat_template = "{% if messages|length > 2 %}" + template + "{% endif %}" + tokenizer.chat_template
    rows = [{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION, QUESTION, ANSWER]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = DataSource(path=str(tmp_path / "a.jsonl"), format="messages")
    with pytest.raises(error, match=message):
        load_corpus([source], picky, max_seq_len=99, train_on="completion")


def test_the_fingerprint_covers_ids_targets_and_order(load):
    rows = [{"prompt": "What is", "completion": " a text."}, {"prompt": "A", "completion": " b"}]
    prints = {
        load(rows, "prompt_completion").fingerprint(),
        load(rows[::-1], "prompt_completion").fingerprint(),
        load(rows, "prompt_completion", train_on="all").fingerprint(),
    }
    assert len(prints) == 3
    assert load(rows, "prompt_completion").fingerprint() in prints


def test_parquet_is_read_like_jsonl(load, tokenizer, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": "A text."}, {"text": "Another."}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = DataSource(path=str(tmp_path / "a.parquet"), format="text")
    corpus = load_corpus([source], tokenizer, max_seq_len=99, train_on="all")
    assert corpus.fingerprint() == load(rows, "text", train_on="all").fingerprint()


def test_reading_says_nothing_and_asks_no_network(load, monkeypatch, capfd):
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    load([{"text": "A text."}], "text")
    with pytest.raises(DataError):
        load(["{"], "text")
    assert capfd.readouterr() == ("", "")


def test_a_batch_lays_documents_end_to_end_and_never_predicts_across_them(load):
    corpus = load([{"text": text} for text in ("One text.", "B", "Another one.")], "text")
    batch = build_batch(corpus.documents)
    lengths = [len(document.token_ids) for document in corpus.documents]
    assert batch.cu_seqlens == [0, lengths[0], sum(lengths[:2]), sum(lengths)]
    assert batch.positions.tolist() == [place for length in lengths for place in range(length)]
    expected = [
        (start + place - 1, int(document.token_ids[place]))
        for start, document in zip(batch.cu_seqlens, corpus.documents, strict=False)
        for place in range(len(document.token_ids))
        if document.supervised[place]
    ]
    assert list(zip(batch.target_index.tolist(), batch.target_ids.tolist(), strict=True)) == expected
    assert len(expected) == corpus.num_supervised_tokens == sum(lengths) - 3
    last_places = {end - 1 for end in batch.cu_seqlens[1:]}
    assert last_places.isdisjoint(batch.target_index.tolist())
