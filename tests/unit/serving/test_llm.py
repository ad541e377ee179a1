"""Text through the engine: nothing lost between tokens and text, and no prompt stops another."""

from pathlib import Path

import pytest

from tessera_cli.engine.engine import SequenceOutput
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.stats import EngineStats
from tessera_cli.errors import ModelError, UsageError
from tessera_cli.serving.llm import LLM, RequestOutput

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
        return [SequenceOutput(request_id, (token,), finish_reason, None, None) for request_id in added]

    added: list[str] = []
    monkeypatch.setattr(
        llm.engine, "add_request", lambda request_id, prompt, params: added.append(request_id)
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
    assert all(output.metrics is not None and output.error is None for output in outputs)


def test_streamed_text_adds_up_to_the_text_and_to_the_tokens(llm: LLM) -> None:
    prompts = ["The quick", "日本語", "A small student"]
    # Hot enough to sample bytes that make no character.
    params = [SamplingParams(temperature=2.0, seed=seed, max_tokens=40, ignore_eos=True) for seed in range(3)]
    streamed = ["", "", ""]

    def on_text(index: int, piece: str) -> None:
        assert piece
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
    (output,) = llm.generate(["x"], GREEDY, on_text=lambda index, piece: pieces.append(piece))
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

    def interrupt(index: int, piece: str) -> None:
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

    def add_and_interrupt(request_id: str, prompt: list[int], params: SamplingParams) -> None:
        add_request(request_id, prompt, params)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "add_request", add_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["fox"], GREEDY)
    assert not llm.engine.has_unfinished()


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
