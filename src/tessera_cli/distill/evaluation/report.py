"""What a run leaves to read: report.md with its curve.png; the words and rows that every report shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tessera_cli.distill.evaluation.provenance import Provenance
from tessera_cli.distill.evaluation.samples import Comparison, Sample
from tessera_cli.distill.events import Evaluated, TrainStep
from tessera_cli.models.config import ModelConfig
from tessera_cli.recipe.schema import Recipe

PROMPT_CHARACTERS = 600
FIGURES_EXPLAINED = (
    "Measured on held-out documents at temperature 1; KL is KL(teacher ‖ student) in nats a token. Agreement "
    "is the share of tokens where the teacher's likeliest token is the student's (top-1) or among its five "
    "likeliest (top-5). Acceptance is Σ min(p, q), the share of the student's draft tokens that speculative "
    "decoding would accept."
)


def _entity(character: str) -> str:
    return f"&#{ord(character)};"


# One table, for one pass: entities hold characters that are escaped themselves. Controls that break no line
# could still drive a terminal.
_ESCAPES = {ord(character): _entity(character) for character in "\\`*_[]#|&<>~$"}
_ESCAPES |= dict.fromkeys((*range(9), *range(14, 28), 31, 127), "\ufffd")


@dataclass(frozen=True)
class Report:
    """All that a report tells; `end` has the figures of the exported weights."""

    recipe: Recipe
    teacher: ModelConfig
    student: ModelConfig
    layers: Sequence[int]
    train_steps: Sequence[TrainStep]
    evaluations: Sequence[Evaluated]
    end: Evaluated
    comparison: Comparison
    notes: Sequence[str]
    provenance: Provenance

    @property
    def start(self) -> Evaluated:
        return self.evaluations[0]


def render_report(report: Report) -> str:
    """The report as Markdown; it shows `curve.png` beside it."""
    sections = [
        f"# {report.recipe.name}",
        summary(report, code="`"),
        *(f"- {note}" for note in report.notes),
        "## Figures",
        markdown_table(figure_header(report), figure_rows(report)),
        FIGURES_EXPLAINED,
        "## Size and speed",
        markdown_table(("", "teacher", "student"), size_rows(report)),
        speed_note(report.comparison),
        "## Training",
        markdown_table(("the median step", "ms", "of it"), training_rows(report)),
        training_note(report),
        "## Curve",
        "![loss and held-out KL over tokens](curve.png)",
    ]
    if report.comparison.samples:
        sections += ["## Answers", "Greedy, to held-out prompts.", *map(_sample, report.comparison.samples)]
    return "\n\n".join(sections) + "\n"


def summary(report: Report, *, code: str) -> str:
    """What was trained from what, and for how long; names stand between two `code` marks."""
    recipe, last = report.recipe, report.train_steps[-1]
    step = report.end.step
    best = "" if step == last.step else f" Its weights are those of step {step:,}, the best of them."
    return (
        f"A student of {report.student.num_hidden_layers} layers, {_start(report, code)} "
        f"{code}{recipe.teacher.model}{code} ({report.teacher.num_hidden_layers} layers), trained by "
        f"{loss_in_words(recipe)} for {last.step:,} steps: {last.tokens:,} tokens, "
        f"{last.supervised_tokens:,} of them supervised.{best}"
    )


def loss_in_words(recipe: Recipe) -> str:
    """The terms of the recipe's loss with their weights."""
    loss = recipe.loss
    terms = [f"{loss.kd_weight:g} × {loss.kind} at T={loss.temperature:g}"] if loss.kd_weight else []
    terms += [f"{loss.ce_weight:g} × cross-entropy"] if loss.ce_weight else []
    if loss.hidden.weight is not None:
        terms.append(f"{loss.hidden.weight:g} × {loss.hidden.kind} of hidden states")
    return " + ".join(terms)


def _start(report: Report, code: str) -> str:
    """Where the student's first weights came from, up to the teacher's name."""
    layers = ", ".join(map(str, report.layers))
    return {
        "teacher_layers": f"started from the layers {layers} of",
        "width": f"cut to {report.student.hidden_size} channels from the layers {layers} of",
        "config": "started from random weights under the teacher",
        "checkpoint": f"started from {code}{report.recipe.student.model}{code} under the teacher",
    }[report.recipe.student.init]


def figure_header(report: Report) -> tuple[str, ...]:
    """The columns of `figure_rows`."""
    return (f"{report.end.num_tokens:,} held-out tokens", "student before", "student after", "teacher")


def figure_rows(report: Report) -> list[tuple[str, ...]]:
    """Every figure before and after training, beside the teacher's own."""
    start, end = report.start, report.end
    return [
        ("KL to the teacher", f"{start.kl:.4f}", f"{end.kl:.4f}", "0"),
        ("cross-entropy", f"{start.cross_entropy:.4f}", f"{end.cross_entropy:.4f}", ""),
        (
            "perplexity",
            f"{start.student_perplexity:,.2f}",
            f"{end.student_perplexity:,.2f}",
            f"{end.teacher_perplexity:,.2f}",
        ),
        ("top-1 agreement", f"{start.top1_agreement:.1%}", f"{end.top1_agreement:.1%}", "100%"),
        ("top-5 agreement", f"{start.top5_agreement:.1%}", f"{end.top5_agreement:.1%}", "100%"),
        ("acceptance", f"{start.acceptance:.1%}", f"{end.acceptance:.1%}", "100%"),
    ]


def size_rows(report: Report) -> list[tuple[str, ...]]:
    """Size and speed of teacher and student."""
    teacher, student, speed = report.teacher, report.student, report.comparison
    rows: list[tuple[str, ...]] = [
        ("parameters", f"{teacher.num_parameters / 1e6:,.1f} M", f"{student.num_parameters / 1e6:,.1f} M"),
        ("layers", str(teacher.num_hidden_layers), str(student.num_hidden_layers)),
    ]
    if speed.num_speed_prompts:
        of_teacher, of_student = speed.teacher_tokens_per_second, speed.student_tokens_per_second
        ratio = of_student / of_teacher
        rows.append(("output tokens/s", f"{of_teacher:,.0f}", f"{of_student:,.0f} ({ratio:.2f}×)"))
    return rows


def speed_note(comparison: Comparison) -> str:
    """How the speeds were measured, or why there are none."""
    if not comparison.num_speed_prompts:
        return "No held-out prompt leaves room for an answer, so there are neither speed nor answers."
    return (
        f"Speed is output tokens a second of {comparison.num_speed_prompts} held-out prompts at once, "
        "both models in this run, on this machine, through the same engine."
    )


def training_rows(report: Report) -> list[tuple[str, ...]]:
    """Where the time of the median step went."""

    def median_ms(part: str) -> float:
        return 1000 * median(getattr(step, f"{part}_seconds") for step in report.train_steps)

    whole = median_ms("step")
    parts = {"teacher": "teacher", "student, both ways": "student", "loss": "loss"}
    times = {name: median_ms(part) for name, part in parts.items()}
    rows: list[tuple[str, ...]] = [
        (name, f"{time:,.0f}", f"{time / whole:.0%}") for name, time in times.items()
    ]
    return [*rows, ("all, with AdamW", f"{whole:,.0f}", "")]


def training_note(report: Report) -> str:
    """How fast training was, and what it needed."""
    steps = report.train_steps
    used = [step.model_flops_utilisation for step in steps if step.model_flops_utilisation is not None]
    share = f"{median(used):.0%} of the machine's rate at matrix products, " if used else ""
    return (
        f"{median(step.tokens_per_second for step in steps):,.0f} tokens a second, "
        f"{median(step.supervised_tokens_per_second for step in steps):,.0f} of them supervised; {share}"
        f"{max(step.peak_memory_bytes for step in steps) / 2**30:.2f} GiB at most; "
        f"{median(step.padding_share for step in steps):.1%} of attention was padding."
    )


def end_of(prompt: str) -> str:
    """The end of a prompt, which is its question; a cut is shown."""
    return prompt if len(prompt) <= PROMPT_CHARACTERS else "… " + prompt[-PROMPT_CHARACTERS:]


def _sample(sample: Sample) -> str:
    answers = [(_plain(sample.teacher), _plain(sample.student))]
    return f"> {_plain(end_of(sample.prompt))}\n\n{markdown_table(('teacher', 'student'), answers)}"


def _plain(text: str) -> str:
    """Text of a user or a model on one line: its line breaks kept, none of its markup in force."""
    line = "<br>".join(text.translate(_ESCAPES).splitlines()) or "(empty)"
    # What a line begins with can make it an item of a list, a rule, or code.
    return _entity(line[0]) + line[1:] if line[0] in "-+=0123456789 " else line


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are markup already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
