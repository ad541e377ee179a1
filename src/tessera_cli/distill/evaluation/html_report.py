"""report.html: the report as one page that fetches nothing and in which no text is markup."""

from datetime import timedelta
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tessera_cli.distill.evaluation.curves import svg_curves
from tessera_cli.distill.evaluation.report import (
    FIGURES_EXPLAINED,
    Report,
    end_of,
    figure_header,
    figure_rows,
    size_rows,
    speed_note,
    summary,
    training_note,
    training_rows,
)
from tessera_cli.distill.evaluation.samples import Sample

# Characters that HTML has no place for; line breaks and tabs it has.
_CONTROLS = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 127), "\ufffd")


def render_html(report: Report) -> str:
    """The page, with its drawings in it; light or dark as the reader's system is."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    curves = svg_curves(report.train_steps, report.evaluations)
    return environment.get_template("report.html.jinja").render(
        recipe=report.recipe,
        summary=summary(report, code=""),
        notes=[note.translate(_CONTROLS) for note in report.notes],
        cards=_cards(report),
        figure_header=figure_header(report),
        figure_rows=figure_rows(report),
        explained=FIGURES_EXPLAINED,
        size_rows=size_rows(report),
        speed_note=speed_note(report.comparison),
        training_rows=training_rows(report),
        training_note=training_note(report),
        # The one thing that is markup already: it was drawn here, from numbers.
        curves={title: Markup(svg) for title, svg in curves.items()},
        samples=[_shown(sample) for sample in report.comparison.samples],
        facts=_facts(report),
        fingerprints=report.provenance.fingerprints,
        recipe_text=report.provenance.recipe,
    )


def _cards(report: Report) -> list[tuple[str, str, str]]:
    """The figures that one looks for first: name, value, and what to hold it against."""
    start, end, speed = report.start, report.end, report.comparison
    cards = [
        ("KL to the teacher", f"{end.kl:.3f}", f"{start.kl:.3f} before"),
        ("top-1 agreement", f"{end.top1_agreement:.1%}", f"{start.top1_agreement:.1%} before"),
        ("acceptance", f"{end.acceptance:.1%}", f"{start.acceptance:.1%} before"),
        ("perplexity", f"{end.student_perplexity:,.1f}", f"the teacher's {end.teacher_perplexity:,.1f}"),
        (
            "parameters",
            f"{report.student.num_parameters / 1e6:,.1f} M",
            f"of the teacher's {report.teacher.num_parameters / 1e6:,.1f} M",
        ),
    ]
    if speed.num_speed_prompts:
        ratio = speed.student_tokens_per_second / speed.teacher_tokens_per_second
        cards.append(("speed", f"{ratio:.2f}×", "the teacher's"))
    return cards


def _facts(report: Report) -> list[tuple[str, str]]:
    told = report.provenance
    return [
        ("started", told.started),
        ("wall time", str(timedelta(seconds=round(told.wall_seconds)))),
        ("optimiser steps", str(timedelta(seconds=round(told.training_seconds)))),
        ("seed", str(told.seed)),
        ("machine", told.machine),
        ("versions", ", ".join(f"{name} {number}" for name, number in told.versions.items())),
    ]


def _shown(sample: Sample) -> Sample:
    texts = end_of(sample.prompt), sample.teacher, sample.student
    return Sample(*(text.translate(_CONTROLS) for text in texts))
