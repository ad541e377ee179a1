import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_cli.recipe.document import dump_document, parse_document, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("5E-5", 5e-5),
        ("1e+3", 1000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.5e1", -5.0),
        ("1_000_000", 1_000_000),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("-3", -3),
        ("+3", 3),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("1__0", "1__0"),
        ("_1", "_1"),
        ("1e", "1e"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("tRue", "tRue"),
        ('"1e-4"', "1e-4"),
        ("''", ""),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    in_file = parse_document(f"key: {text}\n")
    on_command_line = parse_value(text)
    assert in_file.problems == on_command_line.problems == []
    assert in_file.value == {"key": value}
    assert on_command_line.value == value
    assert type(on_command_line.value) is type(value)


@pytest.mark.parametrize(
    "text", ["a: b", "a # b", "*x", "a=b=c", "two words", "- 1", "!x", "%", "C:\\dir", "&a"]
)
def test_an_override_value_is_taken_whole(text: str) -> None:
    assert parse_value(text).value == text


def test_a_list_on_the_command_line() -> None:
    assert parse_value("[0, 2e0, 'x']").value == [0, 2.0, "x"]
    assert parse_value("[0, 2").problems != []


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=1), inner),
    max_leaves=8,
)


@given(plain)
@settings(max_examples=40, deadline=None)
def test_what_is_dumped_is_read_back_equal(value: object) -> None:
    document = parse_document(dump_document(value))
    assert document.problems == []
    assert document.value == value


@given(st.text(alphabet="yesnofftru0123456789eE.+-_x:~ "))
@settings(max_examples=60, deadline=None)
def test_dumped_text_is_text_for_yaml_1_1_too(text: str) -> None:
    assert yaml.safe_load(dump_document({"key": text})) == {"key": text}


def test_every_duplicate_key_is_told_with_both_lines() -> None:
    document = parse_document("a: 1\nb:\n  c: 1\n  c: 2\na: 3\n")
    assert [(p.where, p.key, p.text) for p in document.problems] == [
        ("line 4", "b.c", "given twice, first on line 3"),
        ("line 5", "a", "given twice, first on line 1"),
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a: [1\nb: 2\n", "line 2"),
        ("a:\n\tb: 1\n", "line 2"),
        ("a: &x [1]\nb: *x\n", "line 2"),
        ("a: !!python/name:os.system x\n", "line 1"),
        ("a: 1\n---\nb: 2\n", "line 2"),
        ("a: \x07\n", "file"),
    ],
)
def test_what_is_not_plain_yaml_is_one_problem_with_a_line(text: str, where: str) -> None:
    document = parse_document(text)
    assert [problem.where for problem in document.problems] == [where]
    assert document.problems[0].text.startswith("not YAML: ")


def test_a_key_is_its_text_and_a_list_is_no_key() -> None:
    assert parse_document("1: a\nnull: b\ntrue: c\n").value == {"1": "a", "null": "b", "true": "c"}
    assert parse_document("? [a]\n: 1\n").problems[0].text == "a key must be text"


@pytest.mark.parametrize("value", ["!!bool x", "!!int x", "!!timestamp x", "!!binary x", "9" * 5000])
def test_a_value_that_its_tag_contradicts_is_one_problem_with_a_line(value: str) -> None:
    document = parse_document(f"a: 1\nb: {value}\n")
    assert [problem.where for problem in document.problems] == ["line 2"]


def test_what_is_nested_too_deeply_or_too_long_is_a_problem() -> None:
    assert [problem.text for problem in parse_document("[" * 5000).problems] == [
        "not YAML: nested too deeply"
    ]
    assert parse_value("[" * 5000).problems != []
    assert parse_value("9" * 5000).problems != []
