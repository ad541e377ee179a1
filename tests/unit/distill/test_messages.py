"""Conversations with tools and system messages: as the template has them, and never left out in silence."""

import json
from copy import copy
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tessera_cli.distill.data.corpus import Corpus, Document, load_corpus
from tessera_cli.errors import DataError
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.data_section import DataSource

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools|tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<call>' + call|tojson + '</call>' }}{% endfor %}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"x": {"default": None}}}}
CALL = {"function": {"name": "add", "arguments": {"x": 1}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "1", "content": "2"},
    {"role": "assistant", "content": "Two."},
]


@pytest.fixture
def plain(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(tiny_model_dir)


@pytest.fixture
def tokenizer(plain: Tokenizer) -> Tokenizer:
    tokenizer = copy(plain)
    vars(tokenizer).pop("_template", None)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture
def load(tmp_path: Path):
    def load(tokenizer: Tokenizer, *rows: dict, name: str = "a.jsonl", **keys) -> Corpus:
        file = tmp_path / name
        if file.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
        else:
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = DataSource(**{"path": str(file), "format": "messages"} | keys)
        return load_corpus([source], tokenizer, max_seq_len=500, train_on="completion")

    return load


def texts(document: Document, tokenizer: Tokenizer) -> tuple[str, str]:
    """All of a document, and what of it is supervised."""
    ids = document.token_ids
    whole, supervised = (
        tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in (ids, ids[document.supervised])
    )
    return whole, supervised


def test_tools_and_calls_are_in_the_text_and_calls_and_answers_are_supervised(load, tokenizer):
    corpus = load(tokenizer, {"messages": CONVERSATION, "tools": [TOOL]})
    text, supervised = texts(corpus.documents[0], tokenizer)
    assert text == tokenizer.render_chat(CONVERSATION, add_generation_prompt=False, tools=[TOOL])
    assert '"default": null' in text
    assert supervised == f"<call>{json.dumps(CALL)}</call><|im_end|>Two.<|im_end|>"


def test_tools_may_be_json_in_a_text_and_stand_in_parquet(load, tokenizer):
    row = {"messages": CONVERSATION, "tools": [TOOL]}
    expected = load(tokenizer, row).fingerprint()
    as_text = row | {"tools": json.dumps([TOOL])}
    assert load(tokenizer, as_text).fingerprint() == expected
    assert load(tokenizer, as_text, name="a.parquet").fingerprint() == expected
    renamed = {"messages": CONVERSATION, "functions": [TOOL]}
    assert load(tokenizer, renamed, columns={"tools": "functions"}).fingerprint() == expected


def test_rows_without_tools_may_stand_beside_rows_with_them(load, tokenizer):
    rows = [{"messages": CONVERSATION, "tools": tools} for tools in (None, [], "null", "[]", [TOOL])]
    lengths = [len(document.token_ids) for document in load(tokenizer, *rows).documents]
    assert len(set(lengths[:4])) == 1
    assert lengths[0] < lengths[4]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": CONVERSATION[:2] + CONVERSATION[4:], "tools": [TOOL]}, "no place for `tools`"),
        ({"messages": CONVERSATION}, "no place for the tool calls of message 3"),
    ],
)
def test_a_template_that_would_leave_tools_out_is_an_error(load, plain, row, message):
    with pytest.raises(DataError, match=f"line 1: the chat template has {message}"):
        load(plain, row)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": CONVERSATION, "tools": [{"name": "\ud800"}]}, "a tool or a tool call has half of"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "\ud800"}]}]},
            "a tool or a tool call has half of",
        ),
        ({"messages": CONVERSATION, "tools": '[{"name": "a", "name": "b"}]'}, "a key is given twice"),
    ],
)
def test_what_no_tokenizer_takes_or_json_would_lose_is_an_error_in_tools_as_well(
    load, tokenizer, row, message
):
    with pytest.raises(DataError, match=f"line 1: .*{message}"):
        load(tokenizer, row)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (
            {"role": "user", "content": "a", "tool_calls": [CALL]},
            "has the key 'tool_calls', a message of",
        ),
        ({"role": "user", "content": "a", "name": "x"}, "has the key 'name'"),
        ({"role": "assistant", "content": "a", "tool_calls": "add"}, "tool_calls` is 'add'"),
        ({"role": "tool", "content": "a", "name": 3}, "name` is 3, expected text"),
        ({"role": "bot", "content": "a"}, "role` is 'bot', expected system, developer, user"),
        ({"role": ["user"], "content": "a"}, r"role` is \['user'\], expected"),
        ({"role": {}, "content": "a"}, r"role` is {}, expected"),
    ],
)
def test_a_message_has_only_what_its_role_has(load, tokenizer, message, fault):
    with pytest.raises(DataError, match=rf"line 1: `messages\[0\].*{fault}"):
        load(tokenizer, {"messages": [message]})


@pytest.mark.parametrize(
    ("tools", "fault"),
    [("{", "text that is not JSON"), ({"a": 1}, "expected a list of function"), ([1], "expected a list")],
)
def test_tools_that_are_no_list_of_definitions_are_an_error(load, tokenizer, tools, fault):
    with pytest.raises(DataError, match=f"line 1: `tools` .*{fault}"):
        load(tokenizer, {"messages": CONVERSATION, "tools": tools})


def test_plain_text_has_no_tools(load, tokenizer):
    row = {"prompt": "What is", "completion": " a text.", "tools": [TOOL]}
    with pytest.raises(DataError, match="line 1: `tools` has no place in plain text"):
        load(tokenizer, row, format="prompt_completion")
