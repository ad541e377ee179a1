"""Sampling parameters: what means nothing is refused in one line, and what is kept cannot change."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera_cli.engine.sampling_params import SamplingParams, StructuredOutput, check_against_vocabulary
from tessera_cli.errors import UsageError

REFUSED: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"temperature": 1e39},  # an infinity in float32, and what is forbidden divided by it is a NaN
    {"temperature": "1"},
    {"temperature": True},
    {"top_p": 0.0},
    {"top_p": 1.1},
    {"top_k": -1},
    {"top_k": 2.0},
    {"min_p": -0.1},
    {"min_p": 1.1},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": -1.0},
    {"repetition_penalty": math.inf},
    {"repetition_penalty": 10**400},
    {"presence_penalty": 2.1},
    {"frequency_penalty": math.nan},
    {"logit_bias": {-1: 1.0}},
    {"logit_bias": {"5": 1.0}},
    {"logit_bias": {True: 1.0}},
    {"logit_bias": {5: 101.0}},
    {"logit_bias": {5: math.nan}},
    {"logit_bias": {5: 10**400}},
    {"logit_bias": [5]},
    {"seed": -1},
    {"seed": 2**63},
    {"n": 0},
    {"n": 2**40},
    {"n": True},
    {"max_tokens": 0},
    {"max_tokens": None},
    {"min_tokens": -1},
    {"min_tokens": 17},
    {"ignore_eos": 1},
    {"stop": "end"},
    {"stop": [""]},
    {"stop": [1]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [1.5]},
    {"stop_token_ids": 3},
    {"logprobs": 21},
    {"logprobs": -1},
    {"logprobs": True},
    {"prompt_logprobs": 21},
    {"prompt_logprobs_start": -1, "prompt_logprobs": 0},
    {"prompt_logprobs_start": 3},
    {"structured_output": {"regex": "a"}},
    {"structured_output": StructuredOutput(regex="a"), "ignore_eos": True},
    {"structured_output": StructuredOutput(regex="a"), "min_tokens": 1},
]


@pytest.mark.parametrize("fields", REFUSED, ids=str)
def test_what_means_nothing_is_refused_in_one_line_that_names_it(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**fields)
    assert next(iter(fields)) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"top_p": 1},
        {"min_p": 1.0, "top_k": 2**70},
        {"repetition_penalty": 0.5, "presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 7: 100.0}},
        {"n": 20, "max_tokens": 5, "min_tokens": 5, "seed": 2**63 - 1},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"ignore_eos": True, "min_tokens": 3, "stop_token_ids": (5,)},
        {"structured_output": StructuredOutput(regex="a"), "stop": ("b",), "n": 2},
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_taken(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.lists(st.integers() | st.text(max_size=2), max_size=3)
    | st.dictionaries(st.integers() | st.text(max_size=2), st.floats() | st.none(), max_size=2)
)


@given(name=st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), value=JUNK)
def test_a_hostile_field_is_a_usage_error_or_harmless(name: str, value: object) -> None:
    with contextlib.suppress(UsageError):
        params = SamplingParams(**{name: value})
        hash(params)
        check_against_vocabulary(params, 100)
        assert all(0 <= token < 100 for token in [*params.stop_token_ids, *params.logit_bias])


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_token_ids_outside_of_the_vocabulary_are_refused(name: str) -> None:
    def params(token: int) -> SamplingParams:
        return SamplingParams(**{name: {token: 1.0} if name == "logit_bias" else (token,)})

    check_against_vocabulary(params(99), 100)
    with pytest.raises(UsageError, match=f"{name} has token id 100"):
        check_against_vocabulary(params(100), 100)


def test_what_was_given_may_change_afterwards_without_effect() -> None:
    bias, stop, tokens = {5: 1.0}, ["a"], [3]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=tokens)  # type: ignore[arg-type]
    bias[6], stop[0], tokens[0] = 2.0, "b", 4
    assert (dict(params.logit_bias), params.stop, params.stop_token_ids) == ({5: 1.0}, ("a",), (3,))
    with pytest.raises(TypeError):
        params.logit_bias[7] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "choice": ("b",)},
        {"regex": ""},
        {"regex": 3},
        {"choice": ()},
        {"choice": "ab"},
        {"choice": ("a", "")},
        {"json_object": "yes"},
        {"json_schema": "{"},
        {"json_schema": "[1]"},
        {"json_schema": "true"},
        {"json_schema": {"const": math.nan}},
        {"json_schema": {"const": {1}}},
        {"json_schema": 7},
        {"grammar": ""},
    ],
    ids=str,
)
def test_a_form_is_exactly_one_thing_and_not_empty(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        StructuredOutput(**fields)
    assert "\n" not in caught.value.message


def test_a_schema_is_the_same_as_an_object_and_as_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    as_object = StructuredOutput(json_schema=schema)
    assert as_object == StructuredOutput(
        json_schema='{"type": "object", "properties": {"a": {"type": "integer"}}}'
    )
    assert hash(SamplingParams(structured_output=as_object)) is not None
