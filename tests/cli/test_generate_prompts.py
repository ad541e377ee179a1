"""`tessera generate` around the engine: each prompt's sampling, what is refused, notes and files."""

from pathlib import Path

import pytest

from tessera_cli.cli.answers import Answer, cut_notes
from tessera_cli.cli.prompt_line import Prompt
from tessera_cli.cli.prompts import check_params, check_priorities, conversations_of, sampling_of
from tessera_cli.engine.sampling_params import SamplingParams, StructuredOutput
from tessera_cli.errors import DataError, UsageError
from tessera_cli.files import write_file


def prompt(
    text: str | None = None, messages: list[dict[str, str]] | None = None, **sampling: object
) -> Prompt:
    return Prompt(text, messages, sampling, "prompts.jsonl line 1")


def test_prompt_i_samples_with_seed_plus_i_unless_it_has_its_own():
    base = SamplingParams(temperature=1.0, max_tokens=9)
    params = sampling_of([prompt("a"), prompt("b", seed=3, max_tokens=2), prompt("c")], base, 10)
    assert [(one.seed, one.max_tokens) for one in params] == [(10, 9), (3, 2), (12, 9)]


def test_a_line_that_contradicts_the_command_line_is_named():
    base = SamplingParams(max_tokens=9, min_tokens=5)
    with pytest.raises(DataError, match="line 1: min_tokens=5"):
        sampling_of([prompt("a", max_tokens=2)], base, 0)
    check_priorities([prompt("a")], "fcfs")


def test_what_is_refused_is_named_with_its_prompt_and_looked_at_once():
    asked: list[SamplingParams] = []

    def check(params: SamplingParams) -> None:
        asked.append(params)
        if params.stop_token_ids:
            raise UsageError("no such token")

    params = [SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(stop_token_ids=(9,))]
    with pytest.raises(DataError, match="line 1: no such token"):
        check_params([prompt("a")] * 3, params, check)
    assert asked == [params[0], params[2]]


def test_what_the_command_line_asks_for_is_named_by_its_option_and_a_lines_own_by_the_line():
    def check(params: SamplingParams) -> None:
        raise UsageError("regex cannot be compiled", param="regex")

    params = [SamplingParams(structured_output=StructuredOutput(regex="("))]
    with pytest.raises(UsageError, match=r"^--regex cannot be compiled"):
        check_params([prompt("a")], params, check)
    with pytest.raises(DataError, match="line 1: regex cannot be compiled"):
        check_params([prompt("a", structured_output=params[0].structured_output)], params, check)


def test_what_has_no_place_in_the_template_is_refused():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert conversations_of([prompt("a")], None, None, has_template=False) is None
    assert conversations_of([prompt("a")], False, None, has_template=True) is None
    with pytest.raises(UsageError, match="no chat template"):
        conversations_of([prompt("a")], True, None, has_template=False)
    with pytest.raises(DataError, match="line 1: `messages`"):
        conversations_of([prompt(messages=chat)], False, None, has_template=True)
    with pytest.raises(DataError, match="system message of its own"):
        conversations_of([prompt(messages=chat)], None, "t", has_template=True)


def test_what_cut_an_answer_is_named():
    def answer(reason: str, num_tokens: int) -> Answer:
        return Answer(0, 0, "p", None, "t", reason, None, 3, num_tokens, 1.0, None)

    notes = cut_notes([answer("length", 8), answer("length", 5), answer("stop", 8)], [8])
    assert notes == [
        "1 of 3 answers is cut by --max-tokens (finish_reason length)",
        "1 of 3 answers is cut by --max-model-len (finish_reason length)",
    ]
    assert cut_notes([answer("stop", 8)], [8]) == []


def test_a_file_that_cannot_be_written_whole_is_not_touched(tmp_path: Path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_file(target, "good then \ud800")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
