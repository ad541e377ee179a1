"""Streamed documents: those of the files, on a course that is known beforehand and goes on from any step."""

import json
from pathlib import Path

import pytest

from tessera_cli.distill.data.packing import buffered_order, numbers_of
from tessera_cli.distill.data.stream import DocumentStream
from tessera_cli.distill.inputs import RunInputs, read_inputs
from tessera_cli.errors import DataError, RecipeError
from tessera_cli.recipe.loader import load_recipe

NUM_DOCUMENTS = 40


@pytest.fixture
def recipe_file(tiny_model_dir: Path, tmp_path: Path) -> Path:
    for part in (0, 1):
        texts = [f"Document {i} of {part}. " * (1 + i * 7 % 5) for i in range(NUM_DOCUMENTS // 2)]
        texts[3] = "word " * 400  # longer than a row
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    (tmp_path / "recipe.yaml").write_text(
        f"""
name: tiny
teacher: {{model: {tiny_model_dir}}}
student: {{num_hidden_layers: 2}}
data:
  train: [{{path: 0.jsonl, format: text}}, {{path: 1.jsonl, format: text}}]
  eval: [{{path: 0.jsonl, format: text}}]
  max_seq_len: 100
train: {{max_steps: 8, micro_batch_size: 1, gradient_accumulation_steps: 2}}
""",
        encoding="utf-8",
    )
    return tmp_path / "recipe.yaml"


def inputs_of(recipe_file: Path, *overrides: str) -> RunInputs:
    return read_inputs(load_recipe(recipe_file, overrides).recipe, home=recipe_file.parent, offline=True)


def streamed(recipe_file: Path, *overrides: str, buffer: int = 6) -> RunInputs:
    keys = ("data.streaming=true", f"data.shuffle_buffer={buffer}")
    return inputs_of(recipe_file, *keys, *overrides)


def token_ids(inputs: RunInputs, start: int = 0) -> list[list[list[int]]]:
    """The ids of every document of every micro-batch, by step."""
    return [
        [document.token_ids.tolist() for micro_batch in step for document in micro_batch]
        for step in inputs.step_documents(start)
    ]


@pytest.mark.parametrize("buffer", [1, 6, 1000])
def test_a_stream_gives_the_documents_of_the_files(recipe_file, buffer):
    whole = inputs_of(recipe_file).train.documents
    told = streamed(recipe_file, "train.max_steps=40", buffer=buffer)
    seen = [document for step in token_ids(told) for document in step]
    first = sorted(seen[: len(whole)])
    assert first == sorted(document.token_ids.tolist() for document in whole)
    in_order = [document.token_ids.tolist() for document in whole]
    assert (seen[: len(whole)] == in_order) == (buffer == 1)


def test_the_counts_of_the_plan_are_those_of_the_documents(recipe_file):
    for length in (("train.max_steps=8",), ("train.max_steps=null", "train.max_tokens=900")):
        inputs = streamed(recipe_file, *length)
        documents = [d for step in inputs.step_documents() for micro_batch in step for d in micro_batch]
        assert sum(len(document.token_ids) for document in documents) == inputs.steps.num_tokens
        assert sum(d.num_supervised_tokens for d in documents) == inputs.steps.num_supervised_tokens
        assert len(list(inputs.step_documents())) == inputs.steps.num_steps


@pytest.mark.parametrize("num_steps", [5, 30])
def test_starting_at_any_step_gives_the_same_documents(recipe_file, num_steps):
    inputs = streamed(recipe_file, f"train.max_steps={num_steps}")
    whole = token_ids(inputs)
    for start in range(num_steps + 1):
        assert token_ids(inputs, start) == whole[start:]


@pytest.mark.parametrize("streaming", [True, False])
def test_held_out_documents_that_are_trained_on_as_well_are_named(recipe_file, streaming):
    lines = (recipe_file.parent / "1.jsonl").read_text().splitlines()
    mixed = [
        json.dumps({"text": "Only held out."}),
        lines[2],
        json.dumps({"text": "Held out, too."}),
        lines[9],
    ]
    (recipe_file.parent / "held-out.jsonl").write_text("\n".join(mixed))
    source = f"data.eval=[{{path: {recipe_file.parent}/held-out.jsonl, format: text}}]"
    epoch = "train.max_steps=40"
    inputs = (streamed if streaming else inputs_of)(recipe_file, source, epoch)
    assert inputs.trained_on == (1, 3)
    assert any("2 of 4 documents are in data.train as well (documents 1, 3)" in note for note in inputs.notes)
    (recipe_file.parent / "held-out.jsonl").write_text("\n".join(mixed[::2]))
    inputs = (streamed if streaming else inputs_of)(recipe_file, source, epoch)
    assert inputs.trained_on == ()
    assert not any("as well" in note for note in inputs.notes)


def test_a_short_run_does_not_read_to_the_end_and_a_longer_one_begins_like_it(recipe_file):
    short, longer = (streamed(recipe_file, f"train.max_steps={steps}") for steps in (2, 30))
    assert len(short.train.lengths) < NUM_DOCUMENTS - 2 == len(longer.train.lengths)
    assert token_ids(longer)[:2] == token_ids(short)


def test_no_more_than_the_buffer_waits(recipe_file, monkeypatch):
    inputs = streamed(recipe_file, "train.max_steps=30", buffer=5)
    read, given = 0, 0
    rows = DocumentStream._rows

    def counted(self):
        nonlocal read
        for row in rows(self):
            read += 1
            yield row

    monkeypatch.setattr(DocumentStream, "_rows", counted)
    for step in inputs.step_documents():
        given += sum(map(len, step))
        if given <= NUM_DOCUMENTS - 2:
            assert read <= given + 5 + 2  # the two that are too long


def test_a_resumed_stream_reads_no_pass_before_its_own(recipe_file, monkeypatch):
    inputs = streamed(recipe_file, "train.max_steps=60")
    per_step = [len(numbers_of(step)) for step in inputs.steps.steps()]
    start = next(i for i in range(60) if sum(per_step[:i]) >= 2 * (NUM_DOCUMENTS - 2))
    passes = 0
    rows = DocumentStream._rows

    def counted(self):
        nonlocal passes
        passes += 1
        yield from rows(self)

    monkeypatch.setattr(DocumentStream, "_rows", counted)
    next(inputs.step_documents(start))
    assert passes == 1


def test_the_fingerprint_and_the_lengths_tell_that_data_changed(recipe_file):
    inputs = streamed(recipe_file, "train.max_steps=30")
    before = inputs.train.fingerprint()
    assert streamed(recipe_file, "train.max_steps=30").train.fingerprint() == before
    file = recipe_file.parent / "0.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([json.dumps({"text": "Document 1 of 0. "}) + "\n", *lines[1:]]))
    assert streamed(recipe_file, "train.max_steps=30").train.fingerprint() != before
    with pytest.raises(DataError, match=r"0\.jsonl line 1 changed while it was read"):
        token_ids(inputs)
    file.write_text(lines[0])
    (recipe_file.parent / "1.jsonl").write_text(lines[0])
    with pytest.raises(DataError, match=r"fewer rows than at first|changed while it was read"):
        token_ids(inputs)


def test_a_stream_with_nothing_to_learn_from_ends_with_an_error(recipe_file):
    (recipe_file.parent / "1.jsonl").write_text(json.dumps({"text": "word " * 400}))
    with pytest.raises(DataError, match=r"nothing to learn from: .*1\.jsonl: 1 of 1 documents are longer"):
        streamed(recipe_file, "data.train=[{path: " + str(recipe_file.parent) + "/1.jsonl, format: text}]")


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (
            ("data.streaming=true", "train.max_steps=null", "train.num_epochs=1"),
            "needs max_tokens or max_steps",
        ),
        (("data.streaming=true", "teacher.cache.kind=hidden"), "needs all documents beforehand"),
        (("data.shuffle_buffer=5",), "only `streaming: true` has one"),
        (
            ("data.streaming=true", "data.train=[{path: 0.jsonl, format: prompts, written_by: teacher}]"),
            "is written before training",
        ),
    ],
)
def test_what_a_stream_cannot_do_is_refused(recipe_file, overrides, fault):
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe_file, overrides)
    assert fault in caught.value.problems[0]


def test_a_buffered_order_has_every_number_once_and_looks_no_further_than_its_buffer():
    for size in (1, 3, 50):
        taken: list[int] = []

        def numbers(taken=taken):
            for number in range(30):
                taken.append(number)
                yield number

        order = []
        for number in buffered_order(numbers(), size, seed=0, epoch=1):
            order.append(number)
            assert len(taken) <= len(order) + size
        assert sorted(order) == list(range(30))
        assert order == list(buffered_order(range(30), size, seed=0, epoch=1))
    assert order != list(buffered_order(range(30), 50, seed=0, epoch=2))
