"""Documents that the teacher writes: once, as `tessera generate` would, whatever stops it."""

import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tessera_cli.distill.data.corpus import Corpus
from tessera_cli.distill.data.teacher_written import ANSWERS_FILE, PARTIAL_FILE, PromptSet
from tessera_cli.distill.evaluation.finished_run import evaluate_run
from tessera_cli.distill.events import Note, StageStarted
from tessera_cli.distill.generation import teacher_answers
from tessera_cli.distill.generation.teacher_answers import read_answered_inputs
from tessera_cli.distill.inputs import RunInputs, read_inputs
from tessera_cli.distill.pipeline import run_recipe
from tessera_cli.distill.plan import plan_recipe
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import DataError, UsageError
from tessera_cli.recipe.loader import load_recipe
from tessera_cli.serving.llm import LLM

PROMPTS = [f"What is {topic}?" for topic in ("a fox", "a student", "a page", "Paris", "a robot", "日本語")]
SAMPLING = "temperature: 0.9, top_p: 0.95, top_k: 50, max_tokens: 10, seed: 5"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def recipe_file(tiny_model_dir: Path, tmp_path: Path) -> Path:
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(
        f"""
name: tiny
teacher: {{model: {tiny_model_dir}}}
student: {{num_hidden_layers: 2}}
data:
  train: [{{path: prompts.jsonl, format: prompts, written_by: teacher, sampling: {{{SAMPLING}}}}}]
  eval: [{{path: prompts.jsonl, format: prompts, written_by: teacher, sampling: {{max_tokens: 6}}}}]
  max_seq_len: 64
train: {{max_steps: 2, micro_batch_size: 1}}
eval: {{samples: 0}}
""",
        encoding="utf-8",
    )
    return tmp_path / "recipe.yaml"


@pytest.fixture
def answered(recipe_file: Path, home: Path) -> Callable[..., RunInputs]:
    def answered(*overrides: str, listener=lambda event: None) -> RunInputs:
        recipe = load_recipe(recipe_file, overrides).recipe
        return read_answered_inputs(recipe, home=home, offline=True, device="cpu", listener=listener)

    return answered


def prompt_set(inputs: RunInputs) -> PromptSet:
    assert isinstance(inputs.train, Corpus)
    return inputs.train.prompt_sets[0]


def stop_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ctrl-C come when so many answers have ended."""
    draw = teacher_answers.draw_answers

    def cut_short(*arguments):
        for number, answer in enumerate(draw(*arguments)):
            if number == count:
                raise KeyboardInterrupt
            yield answer

    monkeypatch.setattr(teacher_answers, "draw_answers", cut_short)


def test_answers_are_those_of_generate_with_the_same_sampling(answered, tiny_model_dir):
    inputs = answered()
    params = [
        SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_tokens=10, seed=5 + index)
        for index in range(len(PROMPTS))
    ]
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    outputs = LLM(tiny_model_dir, device="cpu").chat(conversations, params)
    documents = inputs.train.documents
    assert len(documents) == len(outputs)
    for document, output in zip(documents, outputs, strict=True):
        prompt = document.num_prompt_tokens
        assert document.token_ids[:prompt].tolist() == output.prompt_token_ids
        assert document.token_ids[prompt:].tolist() == output.outputs[0].token_ids
        assert document.supervised[prompt:].all()
        assert not document.supervised[:prompt].any()
    texts = [answer.answer for answer in prompt_set(inputs).answers().values()]
    assert texts == [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("count", [0, 1, 4])
def test_stopped_and_continued_is_the_same_to_the_byte(answered, recipe_file, tmp_path, monkeypatch, count):
    directory = prompt_set(answered()).directory
    whole = (directory / ANSWERS_FILE).read_bytes()
    elsewhere = tmp_path / "elsewhere"
    recipe = load_recipe(recipe_file).recipe

    def again() -> RunInputs:
        return read_answered_inputs(
            recipe, home=elsewhere, offline=True, device="cpu", listener=lambda event: None
        )

    with monkeypatch.context() as patch:
        stop_after(count, patch)
        with pytest.raises(KeyboardInterrupt):
            again()
    stopped = elsewhere / "teacher-written" / directory.name
    lines = (stopped / PARTIAL_FILE).read_bytes().splitlines()
    assert len(lines) == count
    # A process that is killed can leave half a line.
    with (stopped / PARTIAL_FILE).open("ab") as file:
        file.write(b'{"index": 3, "pro')
    again()
    assert (stopped / ANSWERS_FILE).read_bytes() == whole
    assert not (stopped / PARTIAL_FILE).exists()


def test_what_is_written_is_written_once(answered, monkeypatch):
    first = answered()
    monkeypatch.setattr(teacher_answers, "load_engine", None)
    assert answered().train.fingerprint() == first.train.fingerprint()


def test_answers_belong_to_their_sampling_and_prompts(answered, recipe_file):
    directories = {prompt_set(answered()).directory}
    for override in ("sampling.seed=6", "sampling.temperature=0.8", "sampling.max_tokens=9"):
        directories.add(prompt_set(answered(f"data.train.0.{override}")).directory)
    with (recipe_file.parent / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "One more?"}) + "\n")
    directories.add(prompt_set(answered()).directory)
    assert len(directories) == 5


def test_an_answer_has_its_end_unless_it_was_cut_and_cut_ones_are_counted(answered):
    inputs = answered("data.train.0.sampling.max_tokens=25", "data.max_seq_len=80")
    answers = prompt_set(inputs).answers().values()
    ends = inputs.teacher.config.eos_token_ids
    reasons = [answer.finish_reason for answer in answers]
    assert set(reasons) == {"stop", "length"}
    for answer in answers:
        assert (answer.token_ids[-1] in ends) == (answer.finish_reason == "stop")
        assert len(answer.token_ids) == 25 or answer.finish_reason == "stop"
    assert inputs.train.intake.num_cut == reasons.count("length")
    assert any(f"{reasons.count('length')} answers of the teacher are cut" in note for note in inputs.notes)


def test_progress_and_the_stage_are_told(answered):
    events: list = []
    answered(listener=events.append)
    assert [event.name for event in events if isinstance(event, StageStarted)] == ["answer", "prepare"]
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any(f"{len(PROMPTS)} of {len(PROMPTS)}" in note for note in notes)


def test_the_plan_counts_the_prompts_and_loads_no_torch(answered, recipe_file, home):
    planned = plan_recipe(load_recipe(recipe_file), home=home, offline=True)
    assert planned.num_documents == len(PROMPTS)
    assert any(f"the teacher has {len(PROMPTS)} prompts of" in note for note in planned.notes)
    answered()
    exact = plan_recipe(load_recipe(recipe_file), home=home, offline=True)
    assert not any("prompts of" in note for note in exact.notes)
    assert exact.num_supervised_tokens <= planned.num_supervised_tokens
    code = f"""
import sys
from pathlib import Path
from tessera_cli.distill.plan import plan_recipe
from tessera_cli.recipe.loader import load_recipe
for home in ({str(home)!r}, {str(home / "none")!r}):
    plan_recipe(load_recipe(Path({str(recipe_file)!r})), home=Path(home), offline=True)
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_prompt_without_room_for_a_whole_answer_is_not_asked(answered, recipe_file):
    with (recipe_file.parent / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "word " * 60}) + "\n")
    inputs = answered()
    assert len(prompt_set(inputs).prompts) == len(PROMPTS)
    assert inputs.train.intake.num_without_room == 1
    assert any("1 of 7 documents have a prompt that leaves a whole answer no room" in n for n in inputs.notes)


def test_a_source_of_which_no_prompt_can_be_asked_leaves_the_others(answered, recipe_file):
    (recipe_file.parent / "long.txt").write_text("word " * 60)
    keys = "format: prompts, written_by: teacher, sampling: {max_tokens: 9}"
    sources = (f"{{path: {recipe_file.parent}/{name}, {keys}}}" for name in ("long.txt", "prompts.jsonl"))
    inputs = answered(f"data.train=[{', '.join(sources)}]")
    assert len(inputs.train.documents) == len(PROMPTS)
    assert inputs.unanswered == ()


def test_faults_elsewhere_are_told_before_the_teacher_answers(answered, home):
    with pytest.raises(UsageError, match="but the teacher has 3 layers"):
        answered("student.num_hidden_layers=7")
    assert not home.exists()


def test_damage_is_told(answered):
    directory = prompt_set(answered()).directory
    file = directory / ANSWERS_FILE
    text = file.read_text()
    file.write_text(text.replace('"token_ids"', '"tokens"', 1))
    with pytest.raises(DataError, match=r"answers\.jsonl line 1 is damaged"):
        answered()
    file.write_text("".join(text.splitlines(keepends=True)[:-1]))
    with pytest.raises(DataError, match="has 5 of 6 answers"):
        answered()


def test_two_writers_exclude_each_other(answered, recipe_file, home):
    unanswered = read_inputs(load_recipe(recipe_file).recipe, home=home, offline=True).unanswered
    directory = unanswered[0].directory
    directory.mkdir(parents=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match="is being written by another process"):
            answered()


@pytest.mark.parametrize("cache", ["none", "hidden"])
def test_a_run_trains_and_is_measured_on_what_the_teacher_wrote(recipe_file, home, tmp_path, cache):
    recipe = load_recipe(recipe_file, [f"teacher.cache.kind={cache}"])
    run_recipe(
        recipe,
        run_dir=tmp_path / "run",
        listener=lambda event: None,
        resume=False,
        overwrite=False,
        device="cpu",
        offline=True,
        home=home,
    )
    evaluate_run(
        tmp_path / "run", limit=None, listener=lambda event: None, device="cpu", home=home, offline=True
    )
