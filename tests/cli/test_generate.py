"""`tessera generate` end to end on a tiny model: records, order, streams, files and exit codes."""

import json
import re
from pathlib import Path

import pytest

from tessera_cli.cli.app import run
from tessera_cli.engine.engine import Engine
from tessera_cli.errors import ExitCode

ENGINE = ["--num-blocks", "128", "--max-num-seqs", "8", "--device", "cpu", "--dtype", "float32"]


@pytest.fixture
def tessera(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]):
    """Runs `tessera generate` on the tiny model; the exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(["generate", str(tiny_model_dir), *ENGINE, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_pipe_gets_one_record_per_prompt_in_order_and_nothing_else(tessera):
    code, out, err = tessera("-p", "Pages of keys", "-p", "The quick", "--max-tokens", "5", "--ignore-eos")
    assert code == ExitCode.SUCCESS
    first, second = records(out)
    assert [(r["index"], r["prompt"]) for r in (first, second)] == [(0, "Pages of keys"), (1, "The quick")]
    for record in (first, second):
        assert record["finish_reason"] == "length"
        assert record["num_output_tokens"] == 5
        assert record["num_prompt_tokens"] > 0
        assert record["ttft_ms"] > 0
        assert record["error"] is None
    assert "2 of 2 answers are cut by --max-tokens" in err
    assert err.splitlines()[-1].startswith("2 prompts, ")
    assert not {"\x1b", "\r"} & set(out + err)


def test_together_gives_what_each_prompt_gives_alone(tessera):
    options = ("--max-tokens", "6", "--ignore-eos", "--raw")
    texts = ["The quick", "Pages of keys and values", "日本"]
    together = tessera(*(part for text in texts for part in ("-p", text)), *options)[1]
    alone = [records(tessera("-p", text, *options)[1])[0]["text"] for text in texts]
    assert [record["text"] for record in records(together)] == alone


def test_equal_prompts_sample_differently_and_repeatably(tessera):
    options = ("-p", "The", "-p", "The", "--temperature", "2", "--max-tokens", "12", "--ignore-eos")
    first, again = tessera(*options)[1], tessera(*options)[1]
    texts = [record["text"] for record in records(first)]
    assert texts[0] != texts[1]
    assert texts == [record["text"] for record in records(again)]
    shifted = [record["text"] for record in records(tessera(*options, "--seed", "1")[1])]
    assert shifted[0] == texts[1]


def test_a_prompt_that_is_too_long_fails_alone(tessera, tmp_path: Path):
    prompts = tmp_path / "p.txt"
    prompts.write_text("The quick\n" + "long " * 600 + "\nPages\n")
    code, out, err = tessera("--prompt-file", str(prompts), "--max-tokens", "3")
    assert code == ExitCode.FAILED
    good, bad, last = records(out)
    assert bad["finish_reason"] == "error"
    assert bad["error"]
    assert (good["error"], last["error"]) == (None, None)
    assert f"warning: {prompts} line 2 failed: " in err
    assert "3 prompts (1 failed)" in err


def test_on_error_fail_stops_and_writes_nothing(tessera, tmp_path: Path):
    target = tmp_path / "out.jsonl"
    code, out, err = tessera("-p", "long " * 600, "-p", "a", "--on-error", "fail", "-o", str(target))
    assert (code, out) == (ExitCode.FAILED, "")
    assert "error: a prompt failed" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["json", "jsonl", "txt"])
def test_a_file_gets_the_format_of_its_suffix(tessera, tmp_path: Path, suffix: str):
    target = tmp_path / f"out.{suffix}"
    target.write_text("old")
    code, out, _ = tessera("-p", "The", "-p", "A", "--max-tokens", "2", "-o", str(target))
    assert (code, out) == (ExitCode.SUCCESS, "")
    text = target.read_text()
    if suffix == "json":
        assert [answer["index"] for answer in json.loads(text)["answers"]] == [0, 1]
    elif suffix == "jsonl":
        assert [record["index"] for record in records(text)] == [0, 1]
    else:
        assert text.startswith("[0] The\n")
        assert "\n\n[1] A\n" in text
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_json_is_one_document_with_answers_and_summary(tessera, tmp_path: Path):
    code, out, _ = tessera("-p", "The", "--max-tokens", "2", "--json")
    document = json.loads(out)
    assert code == ExitCode.SUCCESS
    assert document["summary"]["completed"] == len(document["answers"]) == 1
    target = tmp_path / "a.jsonl"
    out = tessera("-p", "The", "--max-tokens", "2", "--json", "-o", str(target))[1]
    assert json.loads(out)["output"] == str(target)


def test_streamed_text_is_the_text(tessera):
    options = ("-p", "日本語と中文", "--max-tokens", "20", "--format", "text", "--ignore-eos")
    streamed, whole = tessera(*options, "--stream"), tessera(*options, "--no-stream")
    assert streamed[1] == whole[1]
    assert streamed[1].endswith("\n")
    assert len(streamed[1]) > 1


def test_messages_and_a_system_message_change_the_prompt(tessera, tmp_path: Path):
    prompts = tmp_path / "p.jsonl"
    lines = [
        {"prompt": "Hi"},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": "Hi", "max_tokens": 1},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    plain = records(tessera("--prompt-file", str(prompts), "--max-tokens", "4", "--ignore-eos")[1])
    assert plain[0]["text"] == plain[1]["text"]
    assert plain[1]["messages"] == lines[1]["messages"]
    assert [record["num_output_tokens"] for record in plain] == [4, 4, 1]
    with_system = records(tessera("-p", "Hi", "--system", "Be kind", "--max-tokens", "4")[1])
    raw = records(tessera("-p", "Hi", "--raw", "--max-tokens", "4")[1])
    counts = [plain[0]["num_prompt_tokens"], with_system[0]["num_prompt_tokens"], raw[0]["num_prompt_tokens"]]
    assert counts[2] < counts[0] < counts[1]


def test_ctrl_c_leaves_the_file_as_it_was(tessera, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    target = tmp_path / "out.jsonl"
    target.write_text("old")
    steps = Engine.step

    def interrupted(self: Engine) -> list:
        if self.stats().num_steps == 2:
            raise KeyboardInterrupt
        return steps(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    code, _, err = tessera("-p", "The", "-p", "A", "--max-tokens", "9", "--ignore-eos", "-o", str(target))
    assert code == ExitCode.INTERRUPTED
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert "state=stopped" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no prompt"),
        (["-p", "a", "--prompt-file", "b.txt"], "both"),
        (["-p", "a", "--format", "jsonl", "--json"], "--json contradicts"),
        (["-p", "a", "-p", "b", "--stream"], "leave --stream out"),
        (["-p", "a", "--stream"], "add --format text"),
        (["-p", "a", "-o", "x.json", "--trace", "x.json"], "would be overwritten"),
        (["--prompt-file", "x.jsonl", "-o", "./x.jsonl"], "would be overwritten"),
        (["--prompt-file", "x.jsonl", "--trace", "x.jsonl"], "would be overwritten"),
        (["-p", "a", "--logit-bias", "7=1", "--logit-bias", "7=2"], "a token twice"),
        (["-p", "a", "--n", "2", "--format", "text", "--stream"], "--stream"),
        (["-p", "a", "--live"], "--live"),
        (["-p", "a", "--temperature", "-1"], "--temperature=-1"),
        (["-p", "a", "--min-tokens", "9", "--max-tokens", "8"], "--min-tokens=9"),
        (["-p", "a", "--stop", ""], "stop"),
        (["-p", "a", "--stop", "\udcff"], "--stop: not Unicode text"),
        (["-p", "a", "--stop-token-id", "384"], "--stop-token-id has token id 384"),
        (["-p", "a", "--logit-bias", "7:1"], "--logit-bias '7:1'"),
        (["-p", "a", "--logit-bias", "384=1"], "--logit-bias has token id 384"),
        (["-p", "a", "--logprobs", "21"], "--logprobs=21"),
        (["-p", "a", "--regex", "a", "--choice", "b"], "regex and choice contradict"),
        (["-p", "a", "--regex", "a", "--ignore-eos"], "ignore_eos"),
        (["-p", "a", "--regex", "("], "error: --regex cannot be compiled"),
        (["-p", "a", "--regex", ""], "error: --regex is ''"),
        (["-p", "a", "--choice", ""], "error: --choice is ['']"),
        (["-p", "a", "--n", "99"], "n=99"),
        (["-p", "a", "--json-schema", "none.json"], "none.json: No such file"),
        (["-p", "a", "--json-schema", "{"], "--json-schema is not JSON"),
        (["-p", "a", "--scheduling-policy", "lifo"], "lifo"),
        (["-p", "a", "--trace", "none/t.jsonl"], "no such directory"),
        (["-p", "a", "-o", "none/out.txt"], "no such directory"),
        (["-p", "a", "--system", "\udcff"], "--system: not Unicode text"),
        (["-p", "a", "-o", "/dev/null"], "not a file"),
        (["-p", "a", "--top-p", "0"], "--top-p=0"),
        (["-p", "a", "--raw", "--system", "b"], "--system"),
    ],
)
def test_a_wrong_command_line_is_told_before_any_work(tessera, arguments: list[str], says: str):
    code, _, err = tessera(*arguments)
    assert code == ExitCode.USAGE
    assert says in err
    assert "hint: " in err


def test_several_answers_to_a_prompt_have_records_of_their_own(tessera):
    options = ("--n", "3", "--temperature", "2", "--max-tokens", "6", "--ignore-eos")
    code, out, err = tessera("-p", "The quick", "-p", "Pages", *options)
    assert code == ExitCode.SUCCESS
    indices = [(record["index"], record["sample_index"]) for record in records(out)]
    assert indices == [(prompt, sample) for prompt in range(2) for sample in range(3)]
    assert len({record["text"] for record in records(out)}) == 6
    assert "6 of 6 answers are cut" in err
    single = records(tessera("-p", "The quick", *options[2:])[1])[0]
    assert single["text"] == records(out)[0]["text"]
    num_prompt = sum(record["num_prompt_tokens"] for record in records(out) if record["sample_index"] == 0)
    assert f"2 prompts, {num_prompt} tokens in, 36 out" in err


def test_several_answers_are_labelled_in_text(tessera):
    options = ("--format", "text", "--max-tokens", "2", "--temperature", "1")
    out = tessera("-p", "The quick", "--n", "2", *options)[1]
    assert out.startswith("[0.0] The quick\n")
    assert "\n\n[0.1] The quick\n" in out


def test_a_stop_string_ends_the_text_before_it_and_is_named(tessera):
    options = ("-p", "The quick", "--max-tokens", "12", "--ignore-eos", "--raw")
    whole = records(tessera(*options)[1])[0]["text"]
    stop = whole[3:6]
    record = records(tessera(*options, "--stop", "never", "--stop", stop)[1])[0]
    assert (record["text"], record["stop_reason"]) == (whole[: whole.index(stop)], stop)
    assert record["finish_reason"] == "stop"
    assert record["num_output_tokens"] < 12
    streamed = tessera(*options, "--stop", stop, "--format", "text", "--stream")[1]
    assert streamed == record["text"] + "\n"


def test_the_bytes_of_the_tokens_are_the_text(tessera):
    options = ("-p", "The quick", "--max-tokens", "12", "--temperature", "3", "--ignore-eos")
    record = records(tessera(*options, "--logprobs", "0")[1])[0]
    parts = [bytes(entry["bytes"]) for entry in record["logprobs"]["content"]]
    assert b"".join(parts).decode(errors="replace") == record["text"]


def test_logprobs_are_written_as_openai_and_vllm_have_them(tessera):
    options = ("-p", "The quick", "--max-tokens", "3", "--ignore-eos", "--raw")
    (record,) = records(tessera(*options, "--logprobs", "2", "--prompt-logprobs", "1")[1])
    content = record["logprobs"]["content"]
    assert [set(entry) for entry in content] == [{"token", "logprob", "bytes", "top_logprobs"}] * 3
    # Greedy: the token is the likeliest.
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0 for entry in content)
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    first, *others = record["prompt_logprobs"]
    assert first is None
    assert len(others) == record["num_prompt_tokens"] - 1
    assert all(min(one["rank"] for one in entry.values()) == 1 for entry in others)
    assert not {"logprobs", "prompt_logprobs"} & set(records(tessera(*options)[1])[0])


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--choice", "red", "--choice", "blue"], "red|blue"),
        (["--regex", "[ab]{3}"], "[ab]{3}"),
        (
            [
                "--json-schema",
                '{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], '
                '"additionalProperties": false}',
            ],
            r"\{\s*\"a\"\s*:\s*1\s*\}",
        ),
    ],
)
def test_answers_have_the_form_that_is_asked_for(tessera, arguments: list[str], pattern: str):
    options = ("-p", "The", "--n", "3", "--temperature", "2", "--max-tokens", "200")
    for record in records(tessera(*options, *arguments)[1]):
        assert record["finish_reason"] == "stop"
        assert re.fullmatch(pattern, record["text"])


def test_a_line_has_sampling_of_its_own(tessera, tmp_path: Path):
    prompts = tmp_path / "p.jsonl"
    lines = [
        {"prompt": "The", "n": 2, "cache_salt": "a"},
        {"prompt": "The", "choice": ["red"], "ignore_eos": False, "priority": -1},
        {"prompt": "The", "logprobs": 1, "logit_bias": {"7": 100}},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    options = ("--prompt-file", str(prompts), "--max-tokens", "4", "--ignore-eos")
    code, _, err = tessera(*options)
    assert (code, "--scheduling-policy priority" in err) == (ExitCode.USAGE, True)
    one, other, red, biased = records(tessera(*options, "--scheduling-policy", "priority")[1])
    assert one["text"] == other["text"]
    assert (red["text"], red["finish_reason"]) == ("red", "stop")
    assert len({entry["token"] for entry in biased["logprobs"]["content"]}) == 1


def test_a_trace_tells_of_every_step(tessera, tmp_path: Path):
    target = tmp_path / "trace.jsonl"
    assert tessera("-p", "The", "--max-tokens", "5", "--ignore-eos", "--trace", str(target))[0] == 0
    _, *steps = records(target.read_text())
    assert len(steps) == 5
    assert "The" not in target.read_text()


def test_a_directory_closed_to_writing_is_told_before_any_work(
    tessera, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Root may write anywhere, so that a real one would prove nothing there.
    monkeypatch.setattr("tessera_cli.cli.answers.os.access", lambda path, mode: path != tmp_path)
    code, _, err = tessera("-p", "a", "-o", str(tmp_path / "out.txt"))
    assert (code, err.splitlines()[0]) == (2, f"error: {tmp_path}: no file can be made there")
