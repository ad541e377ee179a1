"""Structured output: what a matcher lets through has the form, and has it whole."""

import json
import re
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tessera_cli.engine.sampler import SampleRow, sample, uniform
from tessera_cli.engine.sampling_params import SamplingParams, StructuredOutput
from tessera_cli.engine.sequence import SampleError
from tessera_cli.engine.structured_output import GrammarVocabulary, Matcher, bitmask_bytes
from tessera_cli.errors import UsageError

VOCAB_SIZE = 384
EOS = {0, 2}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def vocabulary(tiny_model_dir: Path) -> GrammarVocabulary:
    return GrammarVocabulary(
        tiny_model_dir / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=sorted(EOS)
    )


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))


def allowed(matcher: Matcher, vocab_size: int = VOCAB_SIZE) -> set[int]:
    row = np.full(bitmask_bytes(vocab_size), 0xFF, dtype=np.uint8)
    matcher.fill_mask(row)
    return set(np.flatnonzero(np.unpackbits(row, bitorder="little")).tolist())


def follow(matcher: Matcher, tokenizer: Tokenizer, text: str) -> None:
    """Let `matcher` accept `text`, checking each token against its mask."""
    for token in tokenizer.encode(text).ids:
        assert token in allowed(matcher)
        matcher.accept(token)


def generate(matcher: Matcher, params: SamplingParams, *, seed: int, limit: int = 200) -> list[int]:
    """Sample from random logits until a token of EOS, which is left out."""
    tokens: list[int] = []
    for position in count():
        assert position < limit
        generator = torch.Generator().manual_seed(1000 * seed + position)
        logits = 2 * torch.randn(1, VOCAB_SIZE, generator=generator)
        row = SampleRow(params, [uniform(seed, 0, position)], tokens, 0, matcher)
        ((token,),) = sample(logits, [row], eos_token_ids=EOS)
        assert not isinstance(token, SampleError)
        matcher.accept(token)
        if token in EOS:
            return tokens
        tokens.append(token)
    raise AssertionError


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    types = {name: type(part) for name, part in value.items()}
    return types == {"name": str, "ok": bool} and len(value["name"]) <= 12


FORMS = [
    (StructuredOutput(json_schema=SCHEMA), is_of_schema),
    (StructuredOutput(json_schema=json.dumps(SCHEMA)), is_of_schema),
    (StructuredOutput(regex=r"[a-f]{2,6}-\d{3}"), lambda text: re.fullmatch(r"[a-f]{2,6}-\d{3}", text)),
    (
        StructuredOutput(choice=("rot", "rosa", 'a "quoted\\" é\n')),
        {"rot", "rosa", 'a "quoted\\" é\n'}.__contains__,
    ),
    (
        StructuredOutput(grammar='start: "<" /[xyz]{1,4}/ ">"'),
        lambda text: re.fullmatch("<[xyz]{1,4}>", text),
    ),
]


@pytest.mark.parametrize(
    ("form", "has_form"), FORMS, ids=lambda value: "" if callable(value) else str(value)[:40]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_comes_out_has_the_form(vocabulary, tokenizer, form, has_form, temperature) -> None:  # type: ignore[no-untyped-def]
    params = SamplingParams(temperature=temperature, structured_output=form)
    texts = set()
    for seed in range(8):
        tokens = generate(vocabulary.compile(form), params, seed=seed)
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert has_form(text), text
        texts.add(text)
    assert len(texts) > 1


def test_any_json_object_is_one(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    matcher = vocabulary.compile(StructuredOutput(json_object=True))
    follow(matcher, tokenizer, '{"a": [1, {"b": null}]}')
    assert allowed(matcher) & EOS == EOS
    assert not allowed(matcher) - EOS  # no white space without end
    assert all(
        tokenizer.decode([token]).startswith("{")
        for token in allowed(vocabulary.compile(StructuredOutput(json_object=True)))
    )


def test_the_end_is_allowed_where_the_form_is_complete_and_alone_where_nothing_may_follow(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    matcher = vocabulary.compile(StructuredOutput(regex="ab?"))
    assert not allowed(matcher) & EOS
    follow(matcher, tokenizer, "a")
    assert allowed(matcher) == EOS | {tokenizer.token_to_id("b")}
    assert not matcher.is_finished
    follow(matcher, tokenizer, "b")
    assert matcher.is_finished
    for token in EOS:
        ended = matcher.fork()
        assert allowed(ended) == EOS
        ended.accept(token)
        assert ended.error is None


def test_a_fork_goes_its_own_way(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    first = vocabulary.compile(StructuredOutput(choice=("ax", "bx")))
    second = first.fork()
    follow(first, tokenizer, "a")
    follow(second, tokenizer, "bx")
    assert allowed(first) == {tokenizer.token_to_id("x")}
    assert second.is_finished
    assert not first.is_finished


def test_reading_the_mask_changes_nothing(vocabulary: GrammarVocabulary, tokenizer: Tokenizer) -> None:
    matcher = vocabulary.compile(StructuredOutput(json_schema=SCHEMA))
    follow(matcher, tokenizer, '{"na')
    assert allowed(matcher) == allowed(matcher)
    follow(matcher, tokenizer, 'me": "')


def test_ids_beyond_the_tokenizer_are_never_allowed(tiny_model_dir: Path) -> None:
    padded = GrammarVocabulary(tiny_model_dir / "tokenizer.json", vocab_size=401, eos_token_ids=[2])
    matcher = padded.compile(StructuredOutput(regex="(.|\n)*"))
    row = np.full(bitmask_bytes(401), 0xFF, dtype=np.uint8)
    matcher.fill_mask(row)
    bits = np.unpackbits(row, count=401, bitorder="little")
    assert bits[:VOCAB_SIZE].sum() > 200
    assert not bits[VOCAB_SIZE:].any()
    logits = torch.zeros(1, 401)
    logits[0, 395] = 50.0
    params = SamplingParams(temperature=0.0)
    ((token,),) = sample(logits, [SampleRow(params, [1.0], matcher=matcher)], eos_token_ids={2})
    assert isinstance(token, int)
    assert token < VOCAB_SIZE


def test_without_an_end_token_the_matcher_says_when_it_is_finished(
    tiny_model_dir: Path, tokenizer: Tokenizer
) -> None:
    endless = GrammarVocabulary(tiny_model_dir / "tokenizer.json", vocab_size=VOCAB_SIZE, eos_token_ids=())
    matcher = endless.compile(StructuredOutput(choice=("ab", "abc")))
    follow(matcher, tokenizer, "ab")
    assert allowed(matcher) == {tokenizer.token_to_id("c")}
    assert not matcher.is_finished
    follow(matcher, tokenizer, "c")
    assert matcher.is_finished
    assert allowed(matcher) == set()


def test_a_token_against_the_form_is_an_error_and_no_end(
    vocabulary: GrammarVocabulary, tokenizer: Tokenizer
) -> None:
    matcher = vocabulary.compile(StructuredOutput(regex="ab"))
    matcher.accept(tokenizer.token_to_id("c"))
    assert matcher.error is not None
    assert "\n" not in matcher.error
    assert not matcher.is_finished
    assert allowed(matcher) == set()
    rows = [SampleRow(SamplingParams(), [0.5], matcher=matcher), SampleRow(SamplingParams(), [0.5])]
    failed, well = sample(torch.zeros(2, VOCAB_SIZE), rows, eos_token_ids=EOS)
    assert isinstance(failed[0], SampleError)
    assert "structured output" in failed[0].message
    assert isinstance(well[0], int)


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}], ids=str)
def test_a_form_that_nothing_has_is_an_error_and_no_empty_answer(
    vocabulary: GrammarVocabulary, schema: dict[str, object]
) -> None:
    matcher = vocabulary.compile(StructuredOutput(json_schema=schema))
    assert allowed(matcher) == set()
    assert matcher.error is not None
    assert not matcher.is_finished


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (StructuredOutput(regex="("), "regex"),
        (StructuredOutput(regex=r"\bword\b"), "regex"),
        (StructuredOutput(json_schema={"type": "nope"}), "json_schema"),
        (StructuredOutput(json_schema={"not": {"type": "string"}}), "json_schema"),
        (StructuredOutput(grammar="start: foo"), "grammar"),
    ],
    ids=str,
)
def test_a_form_that_means_nothing_is_refused_in_one_line(
    vocabulary: GrammarVocabulary, form: StructuredOutput, name: str
) -> None:
    with pytest.raises(UsageError) as caught:
        vocabulary.compile(form)
    assert caught.value.message.startswith(f"{name} cannot be compiled: ")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) > len(f"{name} cannot be compiled: ") + 5


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 10])
def test_a_tokenizer_that_cannot_be_used_is_a_usage_error(
    tiny_model_dir: Path, tmp_path: Path, vocab_size: int
) -> None:
    path = (tiny_model_dir if vocab_size < VOCAB_SIZE else tmp_path) / "tokenizer.json"
    with pytest.raises(UsageError, match="cannot use"):
        GrammarVocabulary(path, vocab_size=vocab_size, eos_token_ids=[2]).compile(StructuredOutput(regex="a"))


def test_neighbours_with_other_forms_change_nothing(vocabulary: GrammarVocabulary) -> None:
    logits = 2 * torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(temperature=t) for t in (0.0, 1.0, 0.5)] * 2
    matchers = [vocabulary.compile(form) for form, _ in FORMS] + [None]
    rows = [
        SampleRow(p, [uniform(row, 0, 0)], matcher=matcher)
        for row, (p, matcher) in enumerate(zip(params, matchers, strict=True))
    ]
    together = sample(logits, rows, eos_token_ids=EOS)
    assert together == [sample(logits[i : i + 1], [rows[i]], eos_token_ids=EOS)[0] for i in range(6)]
