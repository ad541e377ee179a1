"""ShareGPT's files are read strictly, and what is not used of them is counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from tessera_cli.errors import DataError
from tessera_cli.serving.sharegpt import read_exchanges


def talk(*turns: tuple[str, str], **others: Any) -> dict[str, Any]:
    return {"conversations": [{"from": who, "value": value} for who, value in turns], **others}


def write(path: Path, value: Any) -> Path:
    path = path / "share.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_first_questions_and_answers_are_taken_and_others_counted(tmp_path: Path):
    path = write(
        tmp_path,
        [
            talk(("human", "q0"), ("gpt", "a0"), ("human", "more"), id="x"),
            talk(("gpt", "a"), ("human", "q")),
            talk(("human", "q")),
            talk(("user", "q3"), ("assistant", "a3")),
            talk(("human", " "), ("gpt", "a")),
            talk(),
        ],
    )
    exchanges, num_others = read_exchanges(path, seed=0)
    assert {(one.question, one.answer, one.source) for one in exchanges} == {
        ("q0", "a0", f"{path} conversation 1"),
        ("q3", "a3", f"{path} conversation 4"),
    }
    assert num_others == 4


def test_the_order_is_the_seeds(tmp_path: Path):
    path = write(tmp_path, [talk(("human", f"q{i}"), ("gpt", "a")) for i in range(20)])
    first, same, other = (read_exchanges(path, seed=seed)[0] for seed in (1, 1, 2))
    assert first == same != other
    assert sorted(one.question for one in first) == sorted(one.question for one in other)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", "json"),
        ({}, "a valid array"),
        ([{}], "conversation 1: `conversations`: field required"),
        ([talk(("human", "q"), ("gpt", "a")), 3], "conversation 2: "),
        ([{"conversations": [{"from": "human"}]}], "conversation 1: `conversations.0.value`: field required"),
        ([{"conversations": [{"from": "human", "value": 3}]}], "`conversations.0.value`: input should be"),
        ([talk(("human", "q"))], "no conversation begins with a question"),
        ([], "no conversation begins with a question"),
    ],
)
def test_a_fault_is_named_by_its_place(tmp_path: Path, content: Any, says: str):
    with pytest.raises(DataError) as caught:
        read_exchanges(write(tmp_path, content), seed=0)
    assert says.lower() in caught.value.message.lower()
    with pytest.raises(DataError, match="no such file"):
        read_exchanges(tmp_path / "missing.json", seed=0)
