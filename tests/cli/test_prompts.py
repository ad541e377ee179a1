"""Prompt files: what is read, and that each fault names its file and line."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera_cli.cli.prompts import read_prompts
from tessera_cli.engine.sampling_params import SamplingParams, StructuredOutput
from tessera_cli.errors import DataError, UsageError


def write(tmp_path: Path, name: str, content: str | bytes) -> str:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def test_prompts_of_the_command_line_keep_their_order_and_spaces():
    assert [prompt.text for prompt in read_prompts(["b ", "a"], None)] == ["b ", "a"]


def test_a_text_file_has_one_prompt_per_non_empty_line(tmp_path: Path):
    name = write(tmp_path, "p.txt", "one\r\n\n  two\n\t\nthr\u2028ee")
    prompts = read_prompts([], name)
    assert [prompt.text for prompt in prompts] == ["one", "  two", "thr\u2028ee"]
    assert prompts[1].source == f"{name} line 3"


def test_stdin_is_read_as_lines_of_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"one\ntwo\n")))
    assert [prompt.text for prompt in read_prompts([], "-")] == ["one", "two"]


def test_a_json_line_carries_messages_and_its_own_sampling(tmp_path: Path):
    messages = [{"role": "user", "content": "hi\u2028there"}]
    lines = [
        json.dumps({"prompt": "a", "temperature": 1, "seed": 0}),
        json.dumps({"messages": messages, "max_tokens": 3}, ensure_ascii=False),
    ]
    first, second = read_prompts([], write(tmp_path, "p.jsonl", "\ufeff" + "\n".join(lines)))
    assert (first.text, first.messages, first.sampling) == ("a", None, {"temperature": 1.0, "seed": 0})
    assert (second.text, second.messages, second.sampling) == (None, messages, {"max_tokens": 3})


def test_a_line_takes_every_sampling_field(tmp_path: Path):
    fields = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": -1.0,
        "frequency_penalty": 1.0,
        "seed": 1,
        "n": 2,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop_token_ids": [5],
        "logprobs": 0,
        "prompt_logprobs": 2,
    }
    line = {
        "prompt": "a",
        "stop": "x",
        "logit_bias": {"7": 1},
        "choice": ["b"],
        "priority": -1,
        "cache_salt": "s",
    }
    (prompt,) = read_prompts([], write(tmp_path, "p.jsonl", json.dumps(fields | line)))
    assert (prompt.priority, prompt.cache_salt) == (-1, "s")
    params = prompt.params(SamplingParams())
    for name, value in fields.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)
    assert (params.stop, params.logit_bias) == (("x",), {7: 1.0})
    assert params.structured_output == StructuredOutput(choice=("b",))
    # Whatever is added to SamplingParams has to be thought of here. From where log-probabilities of the
    # prompt are told is a saving for evaluations, which know it in tokens; whoever writes a text does not.
    not_asked_for = {"prompt_logprobs_start"}
    assert set(vars(params)) == {*fields, "stop", "logit_bias", "structured_output"} | not_asked_for


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a", "regex": "b", "choice": ["c"]}', "regex and choice contradict"),
        ('{"prompt": "a", "choice": []}', "choice"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "`logit_bias.x"),
        ('{"prompt": "a", "json_schema": "{}"}', "`json_schema`"),
        ('{"prompt": "a", "stop": 3}', "`stop"),
        ('{"prompt": "a", "cache_salt": ""}', "`cache_salt`"),
        ('{"prompt": "a", "priority": 1.5}', "`priority`"),
        ('{"prompt": "a", "n": 0}', "`n`"),
        ('{"prompt": "a", "max_token": 3}', "unknown key `max_token`"),
        ('{"prompt": "a", "prompt_logprobs": 1, "prompt_logprobs_start": 1}', "unknown key"),
        ('{"prompt": "a", "max_tokens": 0}', "`max_tokens`"),
        ('{"prompt": "a", "max_tokens": "3"}', "`max_tokens`"),
        ('{"prompt": "a", "max_tokens": true}', "`max_tokens`"),
        ('{"prompt": "a", "temperature": NaN}', "`temperature`"),
        ('{"prompt": "a", "top_p": 1.5}', "`top_p`"),
        ('{"prompt": "a", "prompt": "b"}', "`prompt` is given twice"),
        ('{"prompt": ""}', "`prompt`"),
        ('{"prompt": "a", "messages": [{"role": "user", "content": "b"}]}', "either `prompt` or `messages`"),
        ('{"seed": 1}', "either `prompt` or `messages`"),
        ('{"messages": []}', "`messages`"),
        ('{"messages": [{"role": "tool", "content": "b"}]}', "`messages.0.role`"),
        ('{"prompt": "a", "logit_bias": {"5": 1, "05": 2}}', "`logit_bias.05"),
        ('{"prompt": "a", "stop": "\\ud800"}', "not Unicode text"),
        ('{"prompt": "a", "regex": "\\ud800"}', "not Unicode text"),
        ('{"prompt": "a", "choice": ["\\udfff"]}', "not Unicode text"),
        ('{"prompt": "a", "json_schema": {"enum": ["\\ud800"]}}', "not Unicode text"),
        ('["a"]', "not a JSON object"),
        ('{"prompt": ', "not a JSON object"),
    ],
)
def test_a_bad_json_line_is_named_with_its_number(tmp_path: Path, line: str, says: str):
    name = write(tmp_path, "p.jsonl", '{"prompt": "good"}\n\n' + line)
    with pytest.raises(DataError) as caught:
        read_prompts([], name)
    assert caught.value.message.startswith(f"{name} line 3: ")
    assert says in caught.value.message


def test_a_file_that_is_not_utf8_is_refused_with_the_line(tmp_path: Path):
    with pytest.raises(DataError, match=r"p\.txt line 2: not UTF-8"):
        read_prompts([], write(tmp_path, "p.txt", b"good\n\xff\xfe\n"))


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, name: str):
    with pytest.raises(DataError, match="no prompts"):
        read_prompts([], write(tmp_path, name, " \n\n"))


def test_a_missing_file_a_folder_and_an_unknown_suffix_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="no such file"):
        read_prompts([], str(tmp_path / "none.txt"))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts([], str(tmp_path / "folder.txt"))
    with pytest.raises(DataError, match=r"\.csv"):
        read_prompts([], write(tmp_path, "p.csv", "a"))


def test_no_prompt_an_empty_one_and_two_sources_are_usage_errors():
    with pytest.raises(UsageError, match="no prompt"):
        read_prompts([], None)
    with pytest.raises(UsageError, match="number 2 is empty"):
        read_prompts(["a", " "], None)
    with pytest.raises(UsageError, match="both"):
        read_prompts(["a"], "-")


@pytest.mark.parametrize(
    "line",
    ['{"prompt": "a\\ud800"}', '{"messages": [{"role": "user", "content": "\\udfff"}]}', "[" * 100_000],
    ids=["prompt", "messages", "deep"],
)
def test_what_no_tokenizer_takes_is_a_data_error_with_its_line(tmp_path: Path, line: str):
    name = write(tmp_path, "p.jsonl", line)
    with pytest.raises(DataError, match="line 1"):
        read_prompts([], name)


def test_stray_bytes_on_the_command_line_are_a_data_error():
    with pytest.raises(DataError, match="number 2: not Unicode text, at character 3"):
        read_prompts(["a", "ab\udcff"], None)
