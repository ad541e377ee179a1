"""The quick start's prompts are reproducible, varied and split without overlap."""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

DATA = Path(__file__).parents[2] / "recipes" / "data"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(DATA)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return importlib.import_module("make_prompts"), importlib.import_module("split")


@pytest.fixture
def prompts(scripts):
    return scripts[0].make_prompts()


def answers_to(prompts):
    return [
        {"index": index, "prompt": prompt.text, "text": f" {index}\u2028\n\x85é ", "finish_reason": "stop"}
        for index, prompt in enumerate(prompts)
    ]


def write(path: Path, records) -> Path:
    """A line separator such as U+2028 stays as it is: it ends no line of JSONL."""
    lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def read(path: Path):
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_the_committed_file_is_what_the_generator_makes(scripts, prompts):
    committed = (DATA / "prompts.jsonl").read_bytes()
    assert committed == scripts[0].to_jsonl(prompts).encode()


def test_every_line_is_a_prompt_file_line_and_nothing_more():
    for record in read(DATA / "prompts.jsonl"):
        assert list(record) == ["prompt"]
        assert record["prompt"] == record["prompt"].strip()


def test_prompts_are_many_and_unlike_each_other(prompts):
    assert len({prompt.text.lower() for prompt in prompts}) == len(prompts) >= 600
    assert max(Counter(prompt.template for prompt in prompts).values()) <= 15
    assert len({prompt.template for prompt in prompts}) >= 100


def test_categories_are_balanced_and_take_turns(prompts):
    counts = Counter(prompt.category for prompt in prompts)
    assert len(counts) >= 15
    assert len(set(counts.values())) == 1
    names = [prompt.category for prompt in prompts[: len(counts)]]
    assert all(prompt.category == names[index % len(names)] for index, prompt in enumerate(prompts))


def test_identifiers_are_unique(prompts):
    assert len({prompt.id for prompt in prompts}) == len(prompts)


def test_no_placeholder_survives_and_lengths_suit_a_small_model(prompts):
    for prompt in prompts:
        assert not set("{}|") & set(prompt.text), prompt
        assert 7 <= len(prompt.text.split()) <= 45, prompt
        assert prompt.text[0].isupper(), prompt
        assert prompt.text[-1] in '.?!"', prompt
        assert "  " not in prompt.text, prompt


def test_too_little_material_is_an_error(scripts, tmp_path):
    material = tmp_path / "material.toml"
    material.write_text('[[group]]\ncategory = "c"\ntemplates = ["Say {0}."]\ntopics = ["a", "b"]\n')
    with pytest.raises(ValueError, match="category c"):
        scripts[0].make_prompts(material)


def test_equal_prompts_of_two_categories_are_an_error(scripts, tmp_path):
    topics = json.dumps([str(number) for number in range(scripts[0].PROMPTS_PER_CATEGORY)])
    group = '[[group]]\ncategory = "{}"\ntemplates = ["Say {{0}}."]\ntopics = {}\n'
    material = tmp_path / "material.toml"
    material.write_text(group.format("a", topics) + group.format("b", topics))
    with pytest.raises(ValueError, match="more than once"):
        scripts[0].make_prompts(material)


def test_split_puts_every_prompt_on_one_side_and_every_category_on_both(scripts, prompts):
    train, held_out, dropped = scripts[1].split(prompts, answers_to(prompts))
    category = {prompt.text: prompt.category for prompt in prompts}
    sides = [[document["messages"][0]["content"] for document in side] for side in (train, held_out)]
    assert not dropped
    assert sorted(sides[0] + sides[1]) == sorted(category)
    for side in sides:
        assert {category[text] for text in side} == set(category.values())
        assert len(set(Counter(category[text] for text in side).values())) == 1
    assert len(train) == 9 * len(held_out)


def test_answers_without_an_end_or_a_text_are_dropped_and_counted(scripts, prompts):
    answers = answers_to(prompts)
    answers[3]["finish_reason"] = "length"
    answers[25] |= {"finish_reason": "error", "text": ""}
    answers[50]["text"] = " \n"
    train, held_out, dropped = scripts[1].split(prompts, answers)
    kept = {document["messages"][0]["content"] for document in train + held_out}
    assert {prompt.text for prompt in prompts} - kept == {prompts[index].text for index in (3, 25, 50)}
    assert dropped == {"finish_reason is length": 1, "finish_reason is error": 1, "empty": 1}


def test_dropping_an_answer_moves_no_other_prompt(scripts, prompts):
    answers = answers_to(prompts)
    whole = scripts[1].split(prompts, answers)[1]
    answers[0]["finish_reason"] = answers[1]["finish_reason"] = "length"
    fewer = scripts[1].split(prompts, answers)[1]
    assert fewer == whole[2:]


def test_documents_are_a_question_and_its_answer(scripts, prompts, tmp_path, monkeypatch):
    records = list(reversed(answers_to(prompts)))
    path = write(tmp_path / "answers.jsonl", records)
    monkeypatch.setattr(sys, "argv", ["split.py", str(path), "--output-dir", str(tmp_path)])
    assert scripts[1].main() == 0
    answer_to = {record["prompt"]: record["text"].strip() for record in records}
    documents = read(tmp_path / "train.jsonl") + read(tmp_path / "eval.jsonl")
    assert len(documents) == len(prompts)
    for document in documents:
        question, answer = document["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        assert answer["content"] == answer_to[question["content"]]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "answers.jsonl",
        "eval.jsonl",
        "train.jsonl",
    ]


@pytest.mark.parametrize("fault", ["missing", "twice", "other prompt"])
def test_answers_to_other_prompts_are_refused_before_anything_is_written(
    scripts, prompts, tmp_path, monkeypatch, capsys, fault
):
    records = answers_to(prompts)
    if fault == "missing":
        records.pop()
    elif fault == "twice":
        records[5] = records[4]
    else:
        records[5]["prompt"], records[6]["prompt"] = records[6]["prompt"], records[5]["prompt"]
    path = write(tmp_path / "answers.jsonl", records)
    monkeypatch.setattr(sys, "argv", ["split.py", str(path), "--output-dir", str(tmp_path)])
    assert scripts[1].main() == 2
    assert "error: " in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["answers.jsonl"]


@pytest.mark.parametrize("name", ["train.jsonl", "eval.jsonl"])
def test_the_committed_documents_answer_the_committed_prompts(scripts, prompts, name):
    held_out = {prompt.text: prompt.number % scripts[1].EVAL_EVERY == 0 for prompt in prompts}
    for document in read(DATA / name):
        question, answer = document["messages"]
        assert held_out[question["content"]] == (name == "eval.jsonl")
        assert answer["content"] == answer["content"].strip() != ""
