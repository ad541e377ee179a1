"""Answers in training: those that the exported student gives, from the trainer's own weights."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tessera_cli.distill.data.on_policy_steps import count_on_policy_steps, is_on_policy
from tessera_cli.distill.events import Event, StudentAnswers, TrainStep
from tessera_cli.distill.generation.answer_log import AnswerLog, LoggedAnswer
from tessera_cli.distill.generation.on_policy import OnPolicyDocuments
from tessera_cli.distill.inputs import RunInputs, read_inputs
from tessera_cli.distill.pipeline import run_recipe
from tessera_cli.distill.students.student import build_student
from tessera_cli.distill.training.lora import add_adapters, merge_adapters
from tessera_cli.distill.training.processes import Processes
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import RunError
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder, save_decoder
from tessera_cli.recipe.loader import load_recipe
from tessera_cli.recipe.sampling_section import OnPolicySection
from tessera_cli.recipe.train_section import LoraSection
from tessera_cli.serving.llm import LLM
from tests.training_factories import assert_same_bits, copy_weights

NUM_STEPS = 6


@pytest.fixture(scope="module")
def recipe_file(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe")
    topics = ["The quick brown fox", "A small student", "Pages of keys", "The capital of France"]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {topics[i % 4]}?"},
                {"role": "assistant", "content": f"{topics[(i + 1) % 4]} is {i}."},
            ]
        }
        for i in range(12)
    ]
    (path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (path / "recipe.yaml").write_text(
        f"""
name: tiny
teacher: {{model: {tiny_model_dir}}}
student: {{num_hidden_layers: 2}}
data:
  train: [{{path: train.jsonl, format: messages}}]
  eval: [{{path: train.jsonl, format: messages}}]
  max_seq_len: 160
  on_policy: {{fraction: 0.6, every: 1, temperature: 1.0, max_tokens: 12, max_num_seqs: 3}}
train:
  max_steps: {NUM_STEPS}
  micro_batch_size: 1
  gradient_accumulation_steps: 2
  learning_rate: 1e-3
eval: {{every: 100, samples: 0}}
checkpoint: {{every: 1, keep: 20}}
""",
        encoding="utf-8",
    )
    return path / "recipe.yaml"


@pytest.fixture
def run(recipe_file: Path, tmp_path: Path) -> Callable[..., Path]:
    def run(
        name: str, *overrides: str, listener: Callable[[Event], None] = lambda event: None, **how: bool
    ) -> Path:
        run_recipe(
            load_recipe(recipe_file, overrides),
            run_dir=tmp_path / name,
            listener=listener,
            **{"resume": False, "overwrite": False} | how,
            device="cpu",
            offline=True,
            home=tmp_path / "home",
        )
        return tmp_path / name

    return run


def inputs_of(recipe_file: Path, *overrides: str) -> RunInputs:
    return read_inputs(load_recipe(recipe_file, overrides).recipe, home=recipe_file.parent, offline=True)


def section_of(inputs: RunInputs) -> OnPolicySection:
    assert inputs.recipe.data.on_policy is not None
    return inputs.recipe.data.on_policy


@pytest.fixture
def student(tiny_model_dir: Path) -> Decoder:
    return build_student(load_decoder(tiny_model_dir, dtype=torch.float32), (0, 2))


def documents_of(inputs: RunInputs, student: Decoder, log: Path) -> OnPolicyDocuments:
    return OnPolicyDocuments(
        inputs, section_of(inputs), student, AnswerLog(log), Processes("cpu"), lambda event: None
    )


def logged(run_dir: Path) -> list[LoggedAnswer]:
    lines = (run_dir / "on_policy.jsonl").read_text(encoding="utf-8").splitlines()
    return [LoggedAnswer.model_validate_json(line) for line in lines]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "export" / "model.safetensors")


def assert_same_run(left: Path, right: Path) -> None:
    assert logged(left) == logged(right)
    mine, theirs = weights(left), weights(right)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine.keys() | theirs.keys())


def test_the_engine_holds_the_trainers_own_weights(recipe_file, student, tmp_path):
    documents = documents_of(inputs_of(recipe_file), student, tmp_path / "log")
    held = {tensor.data_ptr() for tensor in documents.engine._runner._model.parameters()}
    assert held == {parameter.data_ptr() for parameter in student.parameters()}


def test_greedy_answers_are_those_of_an_export_after_any_change_of_the_weights(
    recipe_file, student, tiny_model_dir, tmp_path
):
    overrides = ("data.on_policy.temperature=0", "data.on_policy.fraction=1")
    inputs = inputs_of(recipe_file, *overrides)
    steps = documents_of(inputs, student, tmp_path / "log").steps(0)
    answers = []
    for number in range(3):
        found = [document for batch in next(steps) for document in batch]
        export = tmp_path / f"export-{number}"
        export.mkdir()
        save_decoder(student, export, dtype=torch.float32)
        inputs.teacher.tokenizer.save(export)
        prompts = [document.token_ids[: document.num_prompt_tokens].tolist() for document in found]
        outputs = LLM(export, device="cpu").generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))
        told = [document.token_ids[document.supervised].tolist() for document in found]
        assert told == [output.outputs[0].token_ids for output in outputs]
        answers.append(told[0])
        with torch.no_grad():
            for parameter in student.parameters():
                parameter.mul_(-1.1)
    assert len(set(map(tuple, answers))) > 1


def test_a_student_with_adapters_answers_as_it_would_merged_and_keeps_its_frozen_weights(
    recipe_file, student, tmp_path
):
    pytest.importorskip("peft")
    inputs = inputs_of(recipe_file, "data.on_policy.fraction=1")
    add_adapters(student, LoraSection(), seed=0)
    log = AnswerLog(tmp_path / "adapted")
    steps = documents_of(inputs, student, log.path).steps(0)
    for number in range(1, 4):
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        before = copy_weights(student)
        next(steps)
        assert_same_bits(copy_weights(student), before)

        merged = copy.deepcopy(student)
        merge_adapters(merged)
        plain = AnswerLog(tmp_path / f"merged-{number}")
        told = documents_of(inputs, merged, plain.path).steps(number - 1)
        next(told)
        answers = plain.read()
        assert answers
        assert {place: log.read()[place] for place in answers} == answers


def test_whatever_ends_the_merging_of_adapters_leaves_frozen_weights_as_they_were(
    recipe_file, student, tmp_path, monkeypatch
):
    layer = pytest.importorskip("peft.tuners.lora.layer")
    add_adapters(student, LoraSection(), seed=0)
    merge, merged = layer.Linear.merge, []

    def stopped_at_the_third(module, **how) -> None:
        merge(module, **how)
        merged.append(module)
        if len(merged) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(layer.Linear, "merge", stopped_at_the_third)
    before = copy_weights(student)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if "lora_B" in name:
                before[name] = parameter.fill_(0.5).clone()
    inputs = inputs_of(recipe_file, "data.on_policy.fraction=1")
    with pytest.raises(KeyboardInterrupt):
        next(documents_of(inputs, student, tmp_path / "log").steps(0))
    assert_same_bits(copy_weights(student), before)
    assert not any(module.merged for module in merged)


def test_adapters_that_have_diverged_are_told(run):
    pytest.importorskip("peft")
    with pytest.raises(RunError, match="adapters have diverged") as error:
        run("diverged", "train.lora.r=2", "data.on_policy.fraction=1", "train.learning_rate=1e30")
    assert error.value.hint == "lower train.learning_rate and start a new run"


def test_where_no_answer_is_due_nothing_is_merged(recipe_file, student, tmp_path, monkeypatch):
    layer = pytest.importorskip("peft.tuners.lora.layer")
    add_adapters(student, LoraSection(), seed=0)
    merges: list[int] = []
    merge = layer.Linear.merge
    monkeypatch.setattr(layer.Linear, "merge", lambda module, **how: (merges.append(1), merge(module, **how)))
    inputs = inputs_of(recipe_file)
    told = documents_of(inputs, student, tmp_path / "log").steps(0)
    is_merged = []
    for _ in range(NUM_STEPS):
        next(told)
        is_merged.append(bool(merges))
        merges.clear()
    section, seed = section_of(inputs), inputs.recipe.seed
    assert is_merged == [is_on_policy(step, section, seed) for step in range(1, NUM_STEPS + 1)]
    assert set(is_merged) == {False, True}


def test_adapters_that_are_trained_on_policy_resume_to_the_same_bits(run):
    pytest.importorskip("peft")

    def interrupt(event: Event) -> None:
        if isinstance(event, TrainStep) and event.step == 3:
            raise KeyboardInterrupt

    overrides = ("train.lora.r=2", "data.on_policy.every=2")
    whole = run("whole", *overrides)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", *overrides, listener=interrupt)
    assert_same_run(run("stopped", *overrides, resume=True), whole)


def test_documents_of_other_steps_stay_and_prompts_stay_in_all(recipe_file, student, tmp_path):
    inputs = inputs_of(recipe_file)
    told = documents_of(inputs, student, tmp_path / "log").steps(0)
    changed = []
    for step, (before, after) in enumerate(zip(inputs.step_documents(), told, strict=True), start=1):
        pairs = [pair for batches in zip(before, after, strict=True) for pair in zip(*batches, strict=True)]
        changed.append(any(mine is not theirs for mine, theirs in pairs))
        assert changed[-1] == is_on_policy(step, section_of(inputs), inputs.recipe.seed)
        for mine, theirs in pairs:
            prompt = mine.num_prompt_tokens
            assert mine.token_ids[:prompt].tolist() == theirs.token_ids[:prompt].tolist()
            if changed[-1]:
                assert np.flatnonzero(theirs.supervised)[0] == prompt
                assert theirs.supervised[prompt:].all()
            assert len(theirs.token_ids) <= inputs.recipe.data.max_seq_len
    assert set(changed) == {False, True}


def test_a_conversation_that_ends_before_an_answer_is_left_out_as_ever(recipe_file):
    (recipe_file.parent / "open.jsonl").write_text(
        json.dumps({"messages": [{"role": "user", "content": "Hello"}]}) + "\n"
    )
    folder = recipe_file.parent
    sources = ", ".join(f"{{path: {folder}/{name}.jsonl, format: messages}}" for name in ("train", "open"))
    assert inputs_of(recipe_file, f"data.train=[{sources}]").train.intake.num_unsupervised == 1


def test_the_share_of_on_policy_steps_is_the_fraction(monkeypatch):
    section = OnPolicySection(fraction=0.3)
    found = sum(is_on_policy(step, section, 7) for step in range(1, 4001))
    assert found / 4000 == pytest.approx(0.3, abs=0.03)
    monkeypatch.setattr("tessera_cli.distill.data.on_policy_steps._MOST_COUNTED", 1000)
    assert count_on_policy_steps(4000, section, 7, estimate=False) == found
    assert count_on_policy_steps(4000, section, 7, estimate=True) == pytest.approx(found, rel=0.1)
    everything = OnPolicySection(fraction=1.0)
    assert all(is_on_policy(step, everything, 7) for step in range(1, 100))


def test_the_split_into_micro_batches_changes_no_answer(recipe_file, student, tmp_path):
    answers = []
    for rows, batches in ((1, 4), (4, 1), (2, 2)):
        split = (f"train.micro_batch_size={rows}", f"train.gradient_accumulation_steps={batches}")
        inputs = inputs_of(recipe_file, *split)
        log = tmp_path / f"{rows}.jsonl"
        for _ in documents_of(inputs, student, log).steps(0):
            pass
        answers.append(log.read_text())
    assert answers[0]
    assert answers[0] == answers[1] == answers[2]


def test_the_pools_size_changes_no_answer(recipe_file, student, tmp_path):
    answers = []
    for width in (1, 3, 30):
        inputs = inputs_of(recipe_file, f"data.on_policy.max_num_seqs={width}")
        log = tmp_path / f"{width}.jsonl"
        for _ in documents_of(inputs, student, log).steps(0):
            pass
        answers.append(log.read_text())
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("stop", [1, 2, 4, 5])
def test_a_run_that_is_stopped_anywhere_in_a_window_ends_with_the_same_bits(run, every, stop):
    def interrupt(event: Event) -> None:
        if isinstance(event, TrainStep) and event.step == stop:
            raise KeyboardInterrupt

    override = f"data.on_policy.every={every}"
    whole = run("whole", override)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", override, listener=interrupt)
    assert_same_run(run("stopped", override, resume=True), whole)


def test_a_run_that_goes_back_to_an_older_checkpoint_answers_anew(run):
    override = "data.on_policy.every=2"
    whole = run("whole", override)

    def interrupt(event: Event) -> None:
        if isinstance(event, TrainStep) and event.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("stopped", override, listener=interrupt)
    stopped = whole.parent / "stopped"
    for step in (2, 3, 4, 5):
        shutil.rmtree(stopped / "checkpoints" / f"step-{step:06d}")
    assert_same_run(run("stopped", override, resume=True), whole)


def test_a_log_without_the_answers_of_a_begun_window_is_an_error(run, tmp_path):
    def interrupt(event: Event) -> None:
        if isinstance(event, TrainStep) and event.step == 2:
            raise KeyboardInterrupt

    overrides = ("data.on_policy.every=4", "data.on_policy.fraction=1")
    with pytest.raises(KeyboardInterrupt):
        run("stopped", *overrides, listener=interrupt)
    log = tmp_path / "stopped" / "on_policy.jsonl"
    log.write_text("")
    with pytest.raises(RunError, match=r"on_policy\.jsonl lacks the answer to prompt 0 of step 1"):
        run("stopped", *overrides, resume=True)


def test_answers_are_told_and_every_token_of_a_run_is_counted(run):
    events: list[Any] = []
    run_dir = run("told", listener=events.append)
    answers = logged(run_dir)
    told = [event for event in events if isinstance(event, StudentAnswers)]
    assert sum(event.num_answers for event in told) == len(answers)
    assert sum(event.num_tokens for event in told) == sum(len(answer.token_ids) for answer in answers)
    cut = [answer for answer in answers if answer.finish_reason == "length"]
    assert sum(event.num_cut for event in told) == len(cut)
    assert all(len(answer.token_ids) == 12 for answer in cut)
    steps = [event for event in events if isinstance(event, TrainStep)]
    assert len(steps) == NUM_STEPS


def test_prompts_alone_are_enough_where_every_step_is_on_policy(run, recipe_file):
    (recipe_file.parent / "prompts.txt").write_text("What is a fox?\n\nWho are you?\n")
    source = f"data.train=[{{path: {recipe_file.parent}/prompts.txt, format: prompts}}]"
    events: list[Any] = []
    run_dir = run("prompts", source, "data.on_policy.fraction=1", listener=events.append)
    answers = logged(run_dir)
    assert {answer.step for answer in answers} == set(range(1, NUM_STEPS + 1))
    # What is learnt is counted after it was answered.
    last = [event for event in events if isinstance(event, TrainStep)][-1]
    assert last.supervised_tokens == sum(len(answer.token_ids) for answer in answers)


def test_a_streamed_run_answers_as_any_other(run):
    stream = ("data.streaming=true", "data.shuffle_buffer=4", "data.on_policy.every=2")
    whole = run("whole", *stream)

    def interrupt(event: Event) -> None:
        if isinstance(event, TrainStep) and event.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("stopped", *stream, listener=interrupt)
    assert_same_run(run("stopped", *stream, resume=True), whole)
