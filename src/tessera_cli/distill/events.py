"""What a run tells whoever listens: the terminal shows it, tests read it, nothing else depends on it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StageStarted:
    """A stage of the run begins: prepare, train, evaluate, export or report."""

    name: str


@dataclass(frozen=True)
class TrainStep:
    """One optimiser step.

    Losses are nats per supervised token, `hidden_loss` is without its weight; times are seconds; `tokens`
    counts what passed through the student since the start of the run, `supervised_tokens` those of them that
    carry a target.
    """

    step: int
    num_steps: int
    tokens: int
    supervised_tokens: int
    loss: float
    kd_loss: float
    ce_loss: float | None
    learning_rate: float
    grad_norm: float
    tokens_per_second: float
    teacher_seconds: float
    step_seconds: float
    peak_memory_bytes: int
    hidden_loss: float | None = None


@dataclass(frozen=True)
class Evaluated:
    """Figures on held-out documents, at temperature 1, as means over `num_tokens` supervised tokens.

    `kl` is KL(teacher ‖ student) in nats; `top1_agreement` and `top5_agreement` are the shares of tokens where
    the teacher's likeliest token is the student's, or among the student's five likeliest; `acceptance` is
    Σ min(p, q), the expected share of draft tokens that speculative decoding would accept.
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
class CheckpointSaved:
    """A checkpoint is complete on disk."""

    step: int
    path: Path


@dataclass(frozen=True)
class Note:
    """One line for the user."""

    text: str


Event = StageStarted | TrainStep | Evaluated | CheckpointSaved | Note
Listener = Callable[[Event], None]
