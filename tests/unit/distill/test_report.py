"""The report shows what happened and nothing of it can be read as markup."""

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tessera_cli.distill.data.corpus import Document
from tessera_cli.distill.evaluation.curves import draw_curve
from tessera_cli.distill.evaluation.provenance import Provenance
from tessera_cli.distill.evaluation.report import Report, loss_in_words, render_report
from tessera_cli.distill.evaluation.samples import Comparison, Sample, compare, held_out_prompts
from tessera_cli.distill.events import Evaluated, TrainStep
from tessera_cli.distill.students.student import build_student
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.loader import load_decoder
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.schema import LossSection, Recipe


def train_step(step: int, loss: float) -> TrainStep:
    return TrainStep(
        step=step,
        num_steps=3,
        tokens=step * 100,
        supervised_tokens=step * 60,
        loss=loss,
        kd_loss=loss,
        ce_loss=None,
        hidden_loss=None,
        learning_rate=1e-3,
        grad_norm=1.0,
        tokens_per_second=50.0,
        supervised_tokens_per_second=30.0,
        step_seconds=2.0,
        teacher_seconds=0.4,
        student_seconds=1.0,
        loss_seconds=0.5,
        padding_share=0.05,
        model_flops_utilisation=0.5,
        peak_memory_bytes=10**9,
    )


def evaluated(step: int, kl: float) -> Evaluated:
    return Evaluated(step, 500, kl, 2.5, 12.18, 9.0, 0.625, 0.875, 0.5)


@pytest.fixture
def report(tiny_model_dir: Path) -> Report:
    source = {"path": "a.jsonl", "format": "messages"}
    recipe = Recipe.model_validate(
        {
            "name": "tiny",
            "teacher": {"model": "org/teacher"},
            "student": {"layers": [0, 2]},
            "data": {"train": [source], "eval": [source]},
            "loss": {"kind": "jsd", "temperature": 2.0, "kd_weight": 0.5, "ce_weight": 0.25},
            "train": {"max_steps": 3},
        }
    )
    config = ModelConfig.from_dir(tiny_model_dir)
    return Report(
        recipe=recipe,
        teacher=config,
        student=config,
        layers=(0, 2),
        train_steps=[train_step(step, 1 / step) for step in (1, 2, 3)],
        evaluations=[evaluated(0, 1.5), evaluated(3, 0.25)],
        end=evaluated(3, 0.25),
        comparison=Comparison((Sample("a | <b>", "x\ny", "`*_"),), 16, 100.0, 250.0),
        notes=["data.train: 1 of 9 documents are left out"],
        provenance=Provenance("today", 9.0, 5.0, 0, "a machine", {}, {}, ""),
    )


def test_the_report_has_the_figures_before_and_after(report):
    text = render_report(report)
    assert "| KL to the teacher | 1.5000 | 0.2500 | 0 |" in text
    assert "| perplexity | 12.18 | 12.18 | 9.00 |" in text
    assert "| top-1 agreement | 62.5% | 62.5% | 100% |" in text
    assert "| top-5 agreement | 87.5% | 87.5% | 100% |" in text
    assert "| output tokens/s | 100 | 250 (2.50×) |" in text
    assert "0.5 × jsd at T=2 + 0.25 × cross-entropy" in text
    assert "layers 0, 2 of `org/teacher`" in text
    assert "300 tokens, 180 of them supervised" in text
    assert "- data.train: 1 of 9 documents are left out" in text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "1 × forward_kl at T=1"),
        ({"kd_weight": 0, "ce_weight": 0.5}, "0.5 × cross-entropy"),
        ({"kd_weight": 0, "hidden": {"kind": "mse", "weight": 2}}, "2 × mse of hidden states"),
        ({"hidden": {"kind": "cosine"}}, "1 × forward_kl at T=1 + 1 × cosine of hidden states"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_term_of_the_loss_is_named_and_no_other(report, keys, words):
    loss = LossSection.model_validate(keys)
    assert loss_in_words(report.recipe.model_copy(update={"loss": loss})) == words


def test_what_models_say_cannot_become_markup(report):
    text = render_report(report)
    assert "> a &#124; &#60;b&#62;\n" in text
    assert "| x<br>y | &#96;&#42;&#95; |" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("- a list", "&#45; a list"),
        ("1. a list", "&#49;. a list"),
        ("    code", "&#32;   code"),
        ("~~~\ncode", "&#126;&#126;&#126;<br>code"),
        ("$x$", "&#36;x&#36;"),
        ("a\x1b[31m\x00b", "a\ufffd&#91;31m\ufffdb"),
        ("a\u2028- b", "a<br>- b"),
        ("\n", "(empty)"),
    ],
)
def test_no_prompt_begins_a_block_of_markup_or_drives_a_terminal(report, text, shown):
    comparison = Comparison((Sample(text, "a", "b"),), 16, 1.0, 1.0)
    assert f"\n> {shown}\n" in render_report(Report(**vars(report) | {"comparison": comparison}))


def test_a_report_without_a_prompt_that_fits_says_so(tiny_model_dir, report):
    import numpy as np

    teacher = load_decoder(tiny_model_dir, dtype=torch.float32)
    ids = np.full(500, 7, dtype=np.int32)
    long = Document(ids, np.arange(500) == 499)
    comparison = compare(teacher, teacher, Tokenizer.from_dir(tiny_model_dir), [long], num_samples=2)
    text = render_report(Report(**vars(report) | {"comparison": comparison}))
    assert "neither speed nor answers" in text
    assert "output tokens/s" not in text


def test_long_prompts_are_visibly_cut_to_their_end(report):
    comparison = Comparison((Sample("x" * 700 + "question?", "a", "b"),), 16, 1.0, 1.0)
    text = render_report(Report(**vars(report) | {"comparison": comparison}))
    assert "> … xxx" in text
    assert "question?\n" in text


def test_the_curve_is_a_drawing_of_readable_size(report):
    png = draw_curve(report.train_steps, report.evaluations)
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert (width, height) == (1200, 675)
    assert zlib.crc32(png) != zlib.crc32(
        draw_curve(report.train_steps, [evaluated(0, 9.0), evaluated(3, 1.0)])
    )


def test_a_prompt_is_all_before_the_last_answer_or_the_first_quarter():
    import numpy as np

    ids = np.arange(8, dtype=np.int32)
    answered = Document(ids, np.array([0, 0, 1, 1, 0, 0, 1, 1], dtype=bool))
    plain = Document(ids, np.array([0] + [1] * 7, dtype=bool))
    documents = [answered, plain, answered]
    assert held_out_prompts(documents, count=2, max_tokens=9) == [[0, 1, 2, 3, 4, 5], [0, 1]]
    assert held_out_prompts(documents, count=3, max_tokens=5) == [[0, 1]]


@torch.no_grad()
def test_answers_are_each_models_own_greedy_continuation(tiny_model_dir):
    import numpy as np

    teacher = load_decoder(tiny_model_dir, dtype=torch.float32)
    tokenizer = Tokenizer.from_dir(tiny_model_dir)
    random = np.random.default_rng(0)
    documents = []
    for length in (12, 7, 15):
        supervised = np.arange(length) >= 5
        documents.append(Document(random.integers(3, 300, length).astype(np.int32), supervised))
    comparison = compare(teacher, build_student(teacher, [0, 1, 2]), tokenizer, documents, num_samples=2)
    assert [sample.teacher for sample in comparison.samples] == [s.student for s in comparison.samples]
    assert [s.prompt for s in comparison.samples] == [
        tokenizer.decode(document.token_ids[:5].tolist()).strip() for document in documents[:2]
    ]
    assert comparison.num_speed_prompts == 3
    assert comparison.teacher_tokens_per_second > 0
    shallow = compare(teacher, build_student(teacher, [0]), tokenizer, documents, num_samples=2)
    assert [s.student for s in shallow.samples] != [s.student for s in comparison.samples]


@torch.no_grad()
def test_answers_have_room_in_the_model_of_fewer_positions(tiny_model_dir):
    import numpy as np

    teacher = load_decoder(tiny_model_dir, dtype=torch.float32)
    student = build_student(teacher, [0])
    student.config = replace(student.config, max_position_embeddings=8)
    document = Document(np.arange(3, 9, dtype=np.int32), np.arange(6) >= 4)
    comparison = compare(teacher, student, Tokenizer.from_dir(tiny_model_dir), [document], num_samples=1)
    assert comparison.num_speed_prompts == 1
    assert comparison.student_tokens_per_second > 0


def test_the_figures_are_those_of_the_exported_weights_and_the_step_is_told(report):
    best = evaluated(2, 0.125)
    chosen = Report(
        **vars(report) | {"evaluations": [evaluated(0, 1.5), best, evaluated(3, 0.25)], "end": best}
    )
    text = render_report(chosen)
    assert "| KL to the teacher | 1.5000 | 0.1250 | 0 |" in text
    assert "Its weights are those of step 2" in text
    assert "Its weights" not in render_report(report)
