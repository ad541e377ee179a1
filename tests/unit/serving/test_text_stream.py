"""One continuation's text: pieces that add up, whole characters, no part of what ends it."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_cli.engine.engine import SequenceOutput
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.step_result import TokenLogprobs
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.serving.text_stream import TextStream
from tessera_cli.serving.token_bytes import TokenBytes

EOS = 2
TEXTS = ["naïve 👩‍👩‍👧 日本語 🚀!", "The quick brown fox\njumps", "é🚀é🚀", "The capital of France is Paris."]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(tiny_model_dir)


@pytest.fixture(scope="module")
def token_bytes(tiny_model_dir: Path) -> TokenBytes:
    return TokenBytes.from_dir(tiny_model_dir)


def step(
    token_ids: Sequence[int],
    reason: FinishReason | None = None,
    *,
    logprobs: tuple[TokenLogprobs, ...] = (),
    stop_reason: int | None = None,
) -> SequenceOutput:
    return SequenceOutput(
        request_id="r",
        index=0,
        new_token_ids=tuple(token_ids),
        logprobs=logprobs,
        prompt_logprobs=None,
        finish_reason=reason,
        stop_reason=stop_reason,
        error=None,
        metrics=None,
    )


def make(tokenizer: Tokenizer, token_bytes: TokenBytes, **params: object) -> TextStream:
    return TextStream(
        0,
        SamplingParams(max_tokens=99, **params),
        tokenizer.stream(),
        eos_token_ids={EOS},
        token_bytes=token_bytes,
        arrival_time=0.0,
    )


def run(
    stream: TextStream, token_ids: Sequence[int], reason: FinishReason = FinishReason.LENGTH
) -> list[str]:
    """The pieces of a continuation that comes one token a step, until a stop string ends it."""
    pieces = []
    for position, token_id in enumerate(token_ids):
        pieces.append(stream.take(step([token_id], reason if position == len(token_ids) - 1 else None)))
        if stream.output.finish_reason is not None:
            break
    return pieces


@settings(max_examples=60, deadline=None)
@given(text=st.sampled_from(TEXTS), data=st.data())
def test_the_pieces_are_the_text_before_the_first_stop_string(
    tokenizer: Tokenizer, token_bytes: TokenBytes, text: str, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : data.draw(st.integers(start + 1, len(text)))]
    stream = make(tokenizer, token_bytes, stop=(stop, "not there"))
    pieces = run(stream, tokenizer.encode(text))
    assert "".join(pieces) == stream.output.text == text[: text.index(stop)]
    assert (stream.output.finish_reason, stream.output.stop_reason) == (FinishReason.STOP, stop)
    assert not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stop_string_that_does_not_come_loses_nothing(
    tokenizer: Tokenizer, token_bytes: TokenBytes, text: str
) -> None:
    stream = make(tokenizer, token_bytes, stop=(text[-3:] + "x", text + "y"))
    assert "".join(run(stream, tokenizer.encode(text))) == stream.output.text == text
    assert (stream.output.finish_reason, stream.output.stop_reason) == (FinishReason.LENGTH, None)


def test_tokens_end_with_the_one_that_completes_the_stop_string(
    tokenizer: Tokenizer, token_bytes: TokenBytes
) -> None:
    token_ids = tokenizer.encode("The quick brown fox")
    text_lens = [len(tokenizer.decode(token_ids[:count])) for count in range(len(token_ids) + 1)]
    wanted = next(count for count, length in enumerate(text_lens) if length >= len("The quick br"))
    alone = make(tokenizer, token_bytes, stop=("k br",))
    run(alone, token_ids)
    together = make(tokenizer, token_bytes, stop=("k br",))
    assert together.take(step(token_ids, FinishReason.LENGTH)) == "The quic"
    assert alone.output.token_ids == together.output.token_ids == token_ids[:wanted]
    assert alone.output == together.output


def test_min_tokens_keeps_stop_strings_from_counting(tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
    token_ids = tokenizer.encode("ababab")
    assert len(token_ids) == 6
    ends = {}
    for min_tokens in range(7):
        stream = make(tokenizer, token_bytes, stop=("ab",), min_tokens=min_tokens)
        run(stream, token_ids)
        ends[min_tokens] = (stream.output.text, len(stream.output.token_ids))
    assert ends == {
        0: ("", 2),
        1: ("", 2),
        2: ("ab", 4),
        3: ("ab", 4),
        4: ("abab", 6),
        5: ("abab", 6),
        6: ("ababab", 6),
    }


def test_a_stop_token_is_no_text_and_the_last_token_of_a_whole_grammar_is(
    tokenizer: Tokenizer, token_bytes: TokenBytes
) -> None:
    token_ids = tokenizer.encode("fox")
    by_token = make(tokenizer, token_bytes, stop_token_ids=(token_ids[-1],))
    by_token.take(step(token_ids, FinishReason.STOP, stop_reason=token_ids[-1]))
    assert by_token.output.text == tokenizer.decode(token_ids[:-1])
    assert by_token.output.stop_reason == token_ids[-1]
    by_eos = make(tokenizer, token_bytes)
    by_eos.take(step([*token_ids, EOS], FinishReason.STOP))
    assert by_eos.output.text == "fox"
    by_grammar = make(tokenizer, token_bytes)
    by_grammar.take(step(token_ids, FinishReason.STOP))
    assert by_grammar.output.text == "fox"


def test_an_end_in_the_same_step_as_the_stop_string_is_its_end(
    tokenizer: Tokenizer, token_bytes: TokenBytes
) -> None:
    stream = make(tokenizer, token_bytes, stop=("x",))
    assert stream.take(step(tokenizer.encode("fox"), FinishReason.LENGTH)) == "fo"
    assert (stream.output.finish_reason, stream.output.stop_reason) == (FinishReason.STOP, "x")


def test_logprobs_have_the_bytes_of_their_tokens(tokenizer: Tokenizer, token_bytes: TokenBytes) -> None:
    token_ids = tokenizer.encode("🚀!")
    rows = tuple(TokenLogprobs(one, -1.5, 2, ((5, -0.5), (one, -1.5), (6, -1.5))) for one in token_ids)
    stream = make(tokenizer, token_bytes, logprobs=3)
    stream.take(step(token_ids, FinishReason.LENGTH, logprobs=rows))
    logprobs = stream.output.logprobs or []
    assert b"".join(one.token_bytes for one in logprobs) == "🚀!".encode()
    assert [top.rank for top in logprobs[0].top] == [1, 2, 2]
    assert logprobs[-1].as_content() == {
        "token": "!",
        "logprob": -1.5,
        "bytes": [33],
        "top_logprobs": [
            {"token": top.token, "logprob": top.logprob, "bytes": list(top.token_bytes)}
            for top in logprobs[-1].top
        ],
    }
    assert set(logprobs[-1].as_prompt_entry()) == {"5", "6", str(token_ids[-1])}
    assert make(tokenizer, token_bytes).output.logprobs is None
