"""The training panel: every event is shown, in few columns, and a pipe gets plain lines."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tessera_cli.cli.event_lines import event_line
from tessera_cli.cli.training_view import TrainingView
from tessera_cli.distill.events import (
    CheckpointSaved,
    Evaluated,
    Note,
    StageStarted,
    StudentAnswers,
    TrainStep,
)

STEP = TrainStep(
    step=1,
    num_steps=100,
    tokens=4096,
    supervised_tokens=2000,
    loss=2.5,
    kd_loss=2.25,
    ce_loss=None,
    hidden_loss=None,
    learning_rate=3e-4,
    grad_norm=1.5,
    tokens_per_second=5321.4,
    supervised_tokens_per_second=2598.3,
    step_seconds=0.77,
    teacher_seconds=0.212,
    student_seconds=0.333,
    loss_seconds=0.111,
    padding_share=0.0625,
    model_flops_utilisation=0.81,
    peak_memory_bytes=3 << 30,
)
EVALUATED = Evaluated(
    step=0,
    num_tokens=65536,
    kl=3.4,
    cross_entropy=5.1,
    student_perplexity=164.0,
    teacher_perplexity=6.3,
    top1_agreement=0.312,
    top5_agreement=0.625,
    acceptance=0.281,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plain_lines(file: io.StringIO) -> list[str]:
    text = file.getvalue()
    assert not {"\x1b", "\r"} & set(text)
    return text.splitlines()


@pytest.mark.parametrize("width", [200, 80, 60])
def test_the_panel_has_every_figure_and_fits(width: int):
    clock = Clock()
    view = TrainingView(Console(file=io.StringIO(), width=width), False, {}, clock=clock)
    clock.now = 0.77
    view.on_event(StageStarted("train"))
    view.on_event(EVALUATED)
    view.on_event(STEP)
    clock.now = 7.7
    view.on_event(replace(STEP, step=10, ce_loss=1.125))
    view.on_event(replace(EVALUATED, step=10, kl=1.2, top1_agreement=0.5))
    view.on_event(CheckpointSaved(10, Path("runs/a/checkpoints/10")))
    text = view.render().plain
    assert max(map(len, text.split("\n"))) < min(width, 80)
    figures = ["train", "10%", "10/100", "ETA 01:09", "loss 2.5000", "kd 2.2500", "ce 1.1250", "lr 3.00e-04"]
    figures += ["grad norm 1.50", "5,321 tokens/s", "supervised 2,598", "MFU 81%", "padding 6.2%"]
    figures += ["770", "teacher 212", "student 333", "loss 111", "peak 3.00 GiB", "step 10"]
    figures += ["KL 1.2000 (start 3.4000)", "agreement 50.0%", "acceptance 28.1%", "runs/a/checkpoints/10"]
    for figure in figures:
        assert figure in text


def test_a_resumed_run_does_not_call_its_first_evaluation_the_start():
    view = TrainingView(Console(file=io.StringIO()), False, {})
    view.on_event(replace(EVALUATED, step=50))
    view.on_event(replace(EVALUATED, step=60))
    assert "start" not in view.render().plain


def test_the_time_left_counts_only_the_steps_of_this_process():
    clock = Clock()
    view = TrainingView(Console(file=io.StringIO()), False, {}, clock=clock)
    for step in (51, 52):
        clock.now += 1.0
        view.on_event(replace(STEP, step=step, step_seconds=1.0))
    assert "ETA 00:48" in view.render().plain


def test_plain_lines_tell_the_first_step_the_last_and_one_in_ten_seconds():
    file, clock = io.StringIO(), Clock()
    header = {"teacher": "a b", "student": "c"}
    with TrainingView(Console(file=file, width=30), False, header, clock=clock) as view:
        for step in range(1, 101):
            clock.now = float(step)
            view.on_event(replace(STEP, step=step))
    lines = plain_lines(file)
    assert lines[0] == 'teacher="a b" student=c'
    steps = [line.split()[0] for line in lines[1:-1]]
    assert steps == [f"step={step}/100" for step in (*range(1, 101, 10), 100)]
    assert lines[-1].startswith("state=done")


def test_a_run_that_is_interrupted_tells_its_last_step():
    file = io.StringIO()
    view = TrainingView(Console(file=file), False, {}, clock=Clock())
    view.on_event(STEP)
    view.on_event(replace(STEP, step=2))
    with pytest.raises(KeyboardInterrupt), view:
        raise KeyboardInterrupt
    assert [line.split()[0] for line in plain_lines(file)] == ["step=1/100", "step=2/100", "state=stopped"]


def test_every_evaluation_is_told_after_the_step_that_led_to_it():
    file = io.StringIO()
    with TrainingView(Console(file=file), False, {}, clock=Clock()) as view:
        view.on_event(STEP)
        view.on_event(replace(STEP, step=2))
        view.on_event(replace(EVALUATED, step=2))
    assert [line.split()[0] for line in plain_lines(file)[:3]] == ["step=1/100", "step=2/100", "evaluated=2"]


def test_notes_are_shown_as_they_are_whatever_they_contain():
    file = io.StringIO()
    note = "[bold]3 documents[/bold] of https://a.b/c are longer than 1024 tokens: " + "x" * 100
    with TrainingView(Console(file=file, width=40), False, {}) as view:
        view.on_event(Note(note))
    assert plain_lines(file)[0] == note
    assert event_line(Note(note)) == note


def test_a_line_has_the_losses_that_the_recipe_asks_for_and_no_other():
    line = event_line(replace(STEP, hidden_loss=0.5))
    assert "loss=2.5000 kd_loss=2.2500 hidden_loss=0.5000" in line
    assert "ce_loss" not in line
    assert "ce_loss=1.1250" in event_line(replace(STEP, ce_loss=1.125))


def test_on_a_terminal_the_panel_is_redrawn_and_the_last_one_stays():
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=True, width=80, _environ={})
    with TrainingView(console, True, {"teacher": "t"}, clock=clock) as view:
        for step in range(1, 101):
            clock.now = step / 100
            view.on_event(replace(STEP, step=step))
        frames = file.getvalue().count("grad norm")
    assert frames == 4
    assert "100/100" in file.getvalue()[-700:]


@pytest.mark.parametrize("width", [1, 5, 21])
def test_a_terminal_of_few_columns_is_no_failure(width: int):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, _environ={})
    with TrainingView(console, True, {"teacher": "some/long-name"}, clock=Clock()) as view:
        view.on_event(STEP)
        assert max(map(len, view.render().plain.split("\n"))) <= 20
    assert "teacher" in file.getvalue()


def test_the_students_answers_are_shown_and_in_a_pipe_told_with_a_step() -> None:
    answers = StudentAnswers(step=1, num_answers=32, num_tokens=1200, num_cut=5, seconds=2.0)
    file = io.StringIO()
    with TrainingView(Console(file=file, width=80, force_terminal=True), True, {}) as view:
        view.on_event(answers)
        view.on_event(STEP)
        assert "on-policy  32 answers   5 cut   600 tokens/s   step 1" in view.render().plain
    clock, file = Clock(), io.StringIO()
    with TrainingView(Console(file=file, width=80), False, {}, clock=clock) as view:
        for step in range(1, 4):
            view.on_event(replace(answers, step=step))
            view.on_event(replace(STEP, step=step))
    told = [line for line in plain_lines(file) if line.startswith("answers=32")]
    assert [line.split()[1] for line in told] == ["answered=1", "answered=3"]
