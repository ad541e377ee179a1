"""What a distillation run tells where nothing can be redrawn: one line of ``key=value`` for each event."""

from tessera_cli.cli.terminal import key_values
from tessera_cli.distill.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    Note,
    StageStarted,
    StudentAnswers,
    TrainStep,
)


def event_line(event: Event) -> str:
    """An event as one line of ``key=value``, under the names of its fields."""
    match event:
        case StageStarted(name):
            return key_values(stage=name)
        case TrainStep():
            return key_values(
                step=f"{event.step}/{event.num_steps}",
                loss=f"{event.loss:.4f}",
                kd_loss=f"{event.kd_loss:.4f}",
                ce_loss=None if event.ce_loss is None else f"{event.ce_loss:.4f}",
                hidden_loss=None if event.hidden_loss is None else f"{event.hidden_loss:.4f}",
                learning_rate=f"{event.learning_rate:.3e}",
                grad_norm=f"{event.grad_norm:.3f}",
                tokens=event.tokens,
                tokens_per_second=f"{event.tokens_per_second:.0f}",
                step_ms=f"{event.step_seconds * 1000:.0f}",
                teacher_ms=f"{event.teacher_seconds * 1000:.0f}",
                student_ms=f"{event.student_seconds * 1000:.0f}",
                loss_ms=f"{event.loss_seconds * 1000:.0f}",
                mfu=None if (mfu := event.model_flops_utilisation) is None else f"{mfu:.3f}",
                peak_memory_gib=f"{event.peak_memory_bytes / 2**30:.2f}",
            )
        case Evaluated():
            return key_values(
                evaluated=event.step,
                kl=f"{event.kl:.4f}",
                top1_agreement=f"{event.top1_agreement:.4f}",
                acceptance=f"{event.acceptance:.4f}",
                cross_entropy=f"{event.cross_entropy:.4f}",
                student_perplexity=f"{event.student_perplexity:.2f}",
                teacher_perplexity=f"{event.teacher_perplexity:.2f}",
                num_tokens=event.num_tokens,
            )
        case StudentAnswers():
            return key_values(
                answers=event.num_answers,
                answered=event.step,
                cut=event.num_cut,
                tokens=event.num_tokens,
                tokens_per_second=f"{event.num_tokens / event.seconds:.0f}",
            )
        case CheckpointSaved(step, path):
            return key_values(checkpoint=step, path=path)
        case Note(text):
            return text
