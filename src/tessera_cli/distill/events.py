"""What a run tells whoever listens: the terminal shows it, tests read it, nothing else depends on it."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class StageStarted:
    """A stage of the run begins: prepare, answer, train, evaluate, export or report."""

    name: str


@dataclass(frozen=True)
class TrainStep:
    """One optimiser step.

    Losses are nats per supervised token, `hidden_loss` is without its weight; `tokens` counts what passed
    through the student since the start of the run, `supervised_tokens` those of them that carry a target.

    Of `step_seconds` the teacher, the student (both ways) and the loss have parts, in the main process; the
    rest is the optimiser. `padding_share` is that of the slots in attention, the one place with padding;
    `model_flops_utilisation` is the part of the devices' arithmetic that the step needed (`StepMeter.stop`).
    """

    step: int
    num_steps: int
    tokens: int
    supervised_tokens: int
    loss: float
    kd_loss: float
    ce_loss: float | None
    hidden_loss: float | None
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    supervised_tokens_per_second: float
    step_seconds: float
    teacher_seconds: float
    student_seconds: float
    loss_seconds: float
    padding_share: float
    model_flops_utilisation: float | None
    peak_memory_bytes: int


@dataclass(frozen=True)
class Evaluated:
    """Figures on held-out documents, at temperature 1, as means over `num_tokens` supervised tokens.

    `kl` is KL(teacher ‖ student) in nats; `top1_agreement` and `top5_agreement` are the shares of tokens
    where the teacher's likeliest token is the student's, or among the student's five likeliest; `acceptance`
    is Σ min(p, q), the expected share of draft tokens that speculative decoding would accept. A perplexity
    that a float64 cannot hold is infinite.
    """

    step: int
    num_tokens: int
    kl: float
    cross_entropy: float
    student_perplexity: float
    teacher_perplexity: float
    top1_agreement: float
    top5_agreement: float
    acceptance: float


@dataclass(frozen=True)
class StudentAnswers:
    """The student has answered the prompts of on-policy steps, `step` the first of them.

    `num_tokens` are those of the answers, `num_cut` the answers that reached their limit.
    """

    step: int
    num_answers: int
    num_tokens: int
    num_cut: int
    seconds: float


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint is complete on disk."""

    step: int
    path: Path


@dataclass(frozen=True)
class Note:
    """One line for the user."""

    text: str


Event = StageStarted | TrainStep | Evaluated | StudentAnswers | CheckpointSaved | Note
Listener = Callable[[Event], None]


def event_values(event: TrainStep | Evaluated) -> dict[str, Any]:
    """The figures of an event by name, for JSON: it has no infinity, and a perplexity that is one is None."""
    return {name: None if value == math.inf else value for name, value in asdict(event).items()}
