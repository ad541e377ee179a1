"""What a run leaves to read: report.md and curve.png."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from tessera_cli.distill.evaluation.samples import Comparison, Sample
from tessera_cli.distill.events import Evaluated, TrainStep
from tessera_cli.models.config import ModelConfig
from tessera_cli.recipe.schema import Recipe

PROMPT_CHARACTERS = 600


def _entity(character: str) -> str:
    return f"&#{ord(character)};"


# One table, for one pass: entities hold characters that are escaped themselves. Controls that break no line
# could still drive a terminal.
_ESCAPES = {ord(character): _entity(character) for character in "\\`*_[]#|&<>~$"}
_ESCAPES |= dict.fromkeys((*range(9), *range(14, 28), 31, 127), "\ufffd")


@dataclass(frozen=True)
class Report:
    """All that the report tells."""

    recipe: Recipe
    teacher: ModelConfig
    student: ModelConfig
    layers: Sequence[int]
    train_steps: Sequence[TrainStep]
    evaluations: Sequence[Evaluated]
    comparison: Comparison
    notes: Sequence[str]

    @property
    def start(self) -> Evaluated:
        return self.evaluations[0]

    @property
    def end(self) -> Evaluated:
        return self.evaluations[-1]


def render_report(report: Report) -> str:
    """The report as Markdown; it shows `curve.png` beside it."""
    sections = [
        f"# {report.recipe.name}",
        _summary(report),
        *(f"- {note}" for note in report.notes),
        "## Figures",
        _figures(report),
        "Measured on held-out documents at temperature 1; KL is KL(teacher ‖ student) in nats a token. "
        "Acceptance is Σ min(p, q), the share of the student's draft tokens that speculative decoding would "
        "accept.",
        "## Size and speed",
        _sizes(report),
        *_speed_note(report.comparison),
        "## Curve",
        "![loss and held-out KL over tokens](curve.png)",
    ]
    if report.comparison.samples:
        sections += ["## Answers", "Greedy, to held-out prompts.", *map(_sample, report.comparison.samples)]
    return "\n\n".join(sections) + "\n"


def draw_curve(train_steps: Sequence[TrainStep], evaluations: Sequence[Evaluated]) -> bytes:
    """The training loss and the held-out KL over the tokens trained on, as a PNG."""
    tokens_at = {0: 0} | {step.step: step.tokens for step in train_steps}
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [step.tokens for step in train_steps],
        [step.loss for step in train_steps],
        color="#9db4cf",
        linewidth=1,
        label="training loss",
    )
    axes.plot(
        [tokens_at[evaluation.step] for evaluation in evaluations],
        [evaluation.kl for evaluation in evaluations],
        color="#b3382c",
        marker="o",
        label="held-out KL(teacher ‖ student)",
    )
    axes.set_xlabel("tokens through the student")
    axes.set_ylabel("nats per supervised token")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def _summary(report: Report) -> str:
    recipe, last = report.recipe, report.train_steps[-1]
    loss = recipe.loss
    terms = [f"{loss.kd_weight:g} × {loss.kind} at T={loss.temperature:g}"] if loss.kd_weight else []
    terms += [f"{loss.ce_weight:g} × cross-entropy"] if loss.ce_weight else []
    return (
        f"A student of {report.student.num_hidden_layers} layers, {_start(report)} `{recipe.teacher.model}` "
        f"({report.teacher.num_hidden_layers} layers), trained by {' + '.join(terms)} for {last.step:,} "
        f"steps: {last.tokens:,} tokens, {last.supervised_tokens:,} of them supervised."
    )


def _start(report: Report) -> str:
    """Where the student's first weights came from, up to the teacher's name."""
    layers = ", ".join(map(str, report.layers))
    return {
        "teacher_layers": f"started from the layers {layers} of",
        "width": f"cut to {report.student.hidden_size} channels from the layers {layers} of",
        "config": "started from random weights under the teacher",
        "checkpoint": f"started from `{report.recipe.student.model}` under the teacher",
    }[report.recipe.student.init]


def _figures(report: Report) -> str:
    start, end = report.start, report.end
    rows = [
        ("KL to the teacher", f"{start.kl:.4f}", f"{end.kl:.4f}", "0"),
        ("cross-entropy", f"{start.cross_entropy:.4f}", f"{end.cross_entropy:.4f}", ""),
        (
            "perplexity",
            f"{start.student_perplexity:,.2f}",
            f"{end.student_perplexity:,.2f}",
            f"{end.teacher_perplexity:,.2f}",
        ),
        ("top-1 agreement", f"{start.top1_agreement:.1%}", f"{end.top1_agreement:.1%}", "100%"),
        ("acceptance", f"{start.acceptance:.1%}", f"{end.acceptance:.1%}", "100%"),
    ]
    return _table((f"{end.num_tokens:,} held-out tokens", "student before", "student after", "teacher"), rows)


def _sizes(report: Report) -> str:
    teacher, student, speed = report.teacher, report.student, report.comparison
    rows = [
        ("parameters", f"{teacher.num_parameters / 1e6:,.1f} M", f"{student.num_parameters / 1e6:,.1f} M"),
        ("layers", str(teacher.num_hidden_layers), str(student.num_hidden_layers)),
    ]
    if speed.num_speed_prompts:
        of_teacher, of_student = speed.teacher_tokens_per_second, speed.student_tokens_per_second
        ratio = of_student / of_teacher
        rows.append(("output tokens/s", f"{of_teacher:,.0f}", f"{of_student:,.0f} ({ratio:.2f}×)"))
    return _table(("", "teacher", "student"), rows)


def _speed_note(comparison: Comparison) -> list[str]:
    if not comparison.num_speed_prompts:
        return ["No held-out prompt leaves room for an answer, so there are neither speed nor answers."]
    return [
        f"Speed is output tokens a second of {comparison.num_speed_prompts} held-out prompts at once, "
        "both models in this run, on this machine, through the same engine."
    ]


def _sample(sample: Sample) -> str:
    prompt = sample.prompt
    # The end of a prompt is its question; the cut is shown.
    shown = prompt if len(prompt) <= PROMPT_CHARACTERS else "… " + prompt[-PROMPT_CHARACTERS:]
    answers = [(_plain(sample.teacher), _plain(sample.student))]
    return f"> {_plain(shown)}\n\n{_table(('teacher', 'student'), answers)}"


def _plain(text: str) -> str:
    """Text of a user or a model on one line: its line breaks kept, none of its markup in force."""
    line = "<br>".join(text.translate(_ESCAPES).splitlines()) or "(empty)"
    # What a line begins with can make it an item of a list, a rule, or code.
    return _entity(line[0]) + line[1:] if line[0] in "-+=0123456789 " else line


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
