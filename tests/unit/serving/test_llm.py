"""Text through the engine: nothing lost between tokens and text, and no prompt stops another."""

from pathlib import Path
from typing import Any

import pytest

from tessera_cli.engine.engine import SequenceOutput
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.stats import EngineStats
from tessera_cli.errors import ModelError, UsageError
from tessera_cli.serving.llm import LLM
from tessera_cli.serving.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> LLM:
    return LLM(tiny_model_dir, device="cpu", num_blocks=60, max_model_len=128)


def script(llm: LLM, monkeypatch: pytest.MonkeyPatch, token_ids: list[int], reason: FinishReason) -> None:
    """Let the engine answer every request with `token_ids`, one a step."""
    remaining = list(token_ids)

    def step() -> list[SequenceOutput]:
        token = remaining.pop(0)
        finish_reason = None if remaining else reason
        return [SequenceOutput(request_id, 0, (token,), finish_reason=finish_reason) for request_id in added]

    added: list[str] = []
    monkeypatch.setattr(
        llm.engine, "add_request", lambda request_id, prompt, params, **_: added.append(request_id)
    )
    monkeypatch.setattr(llm.engine, "step", step)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["The quick brown fox", [5, 6, 7], "What is the capital of France?"]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 3, 6)]
    ended: list[str] = []
    outputs = llm.generate(prompts, params, on_finished=lambda output: ended.append(output.request_id))
    assert [output.prompt for output in outputs] == [prompts[0], None, prompts[2]]
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 3, 6]
    assert ended == [outputs[index].request_id for index in (1, 2, 0)]
    assert {output.outputs[0].finish_reason for output in outputs} == {FinishReason.LENGTH}
    assert all(output.error is None for output in outputs)
    for output in outputs:
        metrics = output.outputs[0].metrics
        assert metrics is not None
        assert metrics.arrival_time < metrics.token_times[0] <= metrics.token_times[-1]
        assert metrics.finished_time == metrics.token_times[-1]


def test_streamed_text_adds_up_to_the_text_and_to_the_tokens(llm: LLM) -> None:
    prompts = ["The quick", "日本語", "A small student"]
    # Hot enough to sample bytes that make no character.
    params = [SamplingParams(temperature=2.0, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(3)]
    streamed = ["", "", ""]

    def on_text(index: int, sample: int, piece: str) -> None:
        assert piece
        assert sample == 0
        streamed[index] += piece

    outputs = llm.generate(prompts, params, on_text=on_text)
    assert [output.outputs[0].text for output in outputs] == streamed
    assert [llm.tokenizer.decode(output.outputs[0].token_ids) for output in outputs] == streamed
    assert any("�" in text for text in streamed)


def test_no_piece_ends_within_a_character(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "naïve 👩‍👩‍👧 日本語 🚀!"
    token_ids = llm.tokenizer.encode(text)
    assert len(token_ids) > len(text)  # most characters take several tokens
    script(llm, monkeypatch, token_ids, FinishReason.LENGTH)
    pieces: list[str] = []
    (output,) = llm.generate(["x"], GREEDY, on_text=lambda index, sample, piece: pieces.append(piece))
    assert output.outputs[0].text == "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_a_character_cut_by_the_end_is_marked_not_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = llm.tokenizer.encode("a🚀")[:-1]
    script(llm, monkeypatch, token_ids, FinishReason.LENGTH)
    (output,) = llm.generate(["x"], GREEDY)
    assert output.outputs[0].text == llm.tokenizer.decode(token_ids)
    assert output.outputs[0].text.endswith("�")


def test_the_stop_token_is_among_the_tokens_and_not_in_the_text(llm: LLM) -> None:
    prompt = "The quick brown fox"
    (free,) = llm.generate([prompt], GREEDY)
    stop = free.outputs[0].token_ids[4]
    assert llm.tokenizer.decode([stop])
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    (stopped,) = llm.generate([prompt], params)
    completion = stopped.outputs[0]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids[-1] == stop
    assert completion.text == llm.tokenizer.decode(completion.token_ids[:-1])


def test_a_prompt_that_does_not_fit_fails_alone(llm: LLM) -> None:
    ended: list[RequestOutput] = []
    outputs = llm.generate(["fox", [5] * 128, [], "dog"], GREEDY, on_finished=ended.append)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "error", "length"]
    assert outputs[1].error is not None
    assert "128" in outputs[1].error
    assert outputs[2].error is not None
    assert outputs[1].outputs[0].text == ""
    assert len(ended) == 4
    assert outputs[0] != outputs[3]


def test_chat_runs_the_rendered_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "How are you?"}]
    rendered = "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    (answer,) = llm.chat([messages], GREEDY)
    assert answer.prompt == rendered
    (raw,) = llm.generate([answer.prompt_token_ids], GREEDY)
    assert raw.outputs == answer.outputs
    assert answer.prompt_token_ids == llm.tokenizer.encode(rendered, add_special_tokens=False)


def test_tells_of_every_step(llm: LLM) -> None:
    before = llm.engine.stats()
    seen: list[EngineStats] = []
    llm.generate(["fox", "dog"], GREEDY, on_step=seen.append)
    assert len(seen) == 12
    assert seen[-1].generation_tokens - before.generation_tokens == 24
    assert seen[0].num_running == 2
    assert seen[-1].num_used_blocks == 0


def test_ctrl_c_passes_through_and_leaves_the_engine_empty(llm: LLM) -> None:
    (expected,) = llm.generate(["fox"], GREEDY)

    def interrupt(index: int, sample: int, piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(["fox", "dog", "teacher"], GREEDY, on_text=interrupt)
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().num_used_blocks == 0
    (after,) = llm.generate(["fox"], GREEDY)
    assert after.outputs == expected.outputs


def test_ctrl_c_while_requests_are_added_leaves_the_engine_empty(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_request = llm.engine.add_request

    def add_and_interrupt(request_id: str, prompt: list[int], params: SamplingParams, **others: Any) -> None:
        add_request(request_id, prompt, params, **others)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "add_request", add_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["fox"], GREEDY)
    assert not llm.engine.has_unfinished()


def test_samples_of_a_prompt_have_text_of_their_own_and_the_first_is_the_only_one(llm: LLM) -> None:
    def params(n: int) -> SamplingParams:
        return SamplingParams(temperature=1.5, seed=3, n=n, max_tokens=10, ignore_eos=True)

    streamed: dict[tuple[int, int], str] = {}

    def on_text(index: int, sample: int, piece: str) -> None:
        streamed[index, sample] = streamed.get((index, sample), "") + piece

    ended: list[RequestOutput] = []
    outputs = llm.generate(["fox", "dog"], [params(3), params(1)], on_text=on_text, on_finished=ended.append)
    assert [[one.index for one in output.outputs] for output in outputs] == [[0, 1, 2], [0]]
    assert streamed == {
        (index, one.index): one.text for index, output in enumerate(outputs) for one in output.outputs
    }
    assert len({one.text for one in outputs[0].outputs}) == 3
    assert sorted(output.request_id for output in ended) == [output.request_id for output in outputs]
    (alone,) = llm.generate(["fox"], params(1))
    assert alone.outputs == outputs[0].outputs[:1]


def test_a_stop_string_ends_one_sample_and_the_others_go_on(llm: LLM) -> None:
    def params(*stop: str) -> SamplingParams:
        return SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=20, ignore_eos=True, stop=stop)

    (free,) = llm.generate(["fox"], params())
    stop = free.outputs[1].text[4:7]
    (stopped,) = llm.generate(["fox"], params(stop))
    reasons = []
    for before, after in zip(free.outputs, stopped.outputs, strict=True):
        assert after.text == before.text.split(stop)[0]
        assert after.token_ids == before.token_ids[: len(after.token_ids)]
        reasons.append(after.finish_reason)
        assert after.stop_reason == (stop if after.finish_reason is FinishReason.STOP else None)
    assert reasons[1] is FinishReason.STOP
    assert FinishReason.LENGTH in reasons
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().num_used_blocks == 0


def test_logprobs_of_prompt_and_output_stand_beside_their_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.generate(["The quick 🚀"], params)
    completion, prompt_logprobs = output.outputs[0], output.prompt_logprobs or []
    assert completion.logprobs is not None
    assert [one.token_id for one in completion.logprobs] == completion.token_ids
    assert all(one.rank == 1 and len(one.top) == 2 and one.top[0].rank == 1 for one in completion.logprobs)
    assert prompt_logprobs[0] is None
    given = [one for one in prompt_logprobs if one is not None]
    assert [one.token_id for one in given] == output.prompt_token_ids[1:]
    assert "The quick 🚀".encode().endswith(b"".join(one.token_bytes for one in given))
    assert all(len(one.top) == 1 for one in given)
    (plain,) = llm.generate(["The quick 🚀"], GREEDY)
    assert plain.prompt_logprobs is plain.outputs[0].logprobs is None


def test_a_salt_keeps_prefixes_apart(llm: LLM) -> None:
    def hits(*salts: str | None) -> int:
        llm.engine.reset_prefix_cache()
        before = llm.engine.stats().prefix_cache_hits
        for salt in salts:
            llm.generate([list(range(5, 55))], GREEDY, cache_salt=salt)
        return llm.engine.stats().prefix_cache_hits - before

    assert hits("a", "b") == hits(None, "a") == 0
    assert hits("a", "a") == hits(None, None) == 48


def test_what_no_prompt_can_have_is_refused_before_any_work(llm: LLM) -> None:
    with pytest.raises(UsageError, match="token id 999"):
        llm.check(SamplingParams(stop_token_ids=(999,)))
    with pytest.raises(UsageError):
        llm.check(SamplingParams(n=10_000))
    llm.check(SamplingParams(min_tokens=9, max_tokens=100_000))
    assert not llm.engine.has_unfinished()


def test_refuses_another_number_of_salts_than_of_prompts(llm: LLM) -> None:
    with pytest.raises(UsageError, match="2 values of cache_salt for 1"):
        llm.generate(["fox"], GREEDY, cache_salt=["a", "b"])


def test_refuses_a_text_in_place_of_a_list(llm: LLM) -> None:
    with pytest.raises(UsageError, match="one text"):
        llm.generate("fox", GREEDY)


def test_refuses_another_number_of_params_than_of_prompts(llm: LLM) -> None:
    with pytest.raises(UsageError, match="2 sampling params for 1"):
        llm.generate(["fox"], [GREEDY, GREEDY])
    assert not llm.engine.has_unfinished()


def test_no_prompts_are_no_work(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_a_missing_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        LLM(tmp_path / "nowhere")
