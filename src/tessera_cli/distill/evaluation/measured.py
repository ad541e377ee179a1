"""What `tessera distill eval` measures: a student against its teacher, and what it was before training."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tessera_cli.distill.data.corpus import Document
from tessera_cli.distill.evaluation.samples import held_out_prompts
from tessera_cli.distill.evaluation.speculative import SpeculativeSpeedup, best_speedup, measure_cost_ratio
from tessera_cli.distill.events import Evaluated, event_values
from tessera_cli.models.decoder import Decoder


@dataclass(frozen=True)
class Measured:
    """Figures on held-out documents of `student`, and of `start`, the untrained one where a run knows it.

    `notes` say what of models and documents is left out; the paths are those of model directories.
    """

    teacher_path: Path
    student_path: Path
    start: Evaluated | None
    student: Evaluated
    speculative: SpeculativeSpeedup | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the same names, for JSON."""
        return asdict(self) | {
            "teacher_path": str(self.teacher_path),
            "student_path": str(self.student_path),
            "start": None if self.start is None else event_values(self.start),
            "student": event_values(self.student),
        }


def speculative_speedup(
    teacher: Decoder, student: Decoder, figures: Evaluated, documents: Sequence[Document]
) -> SpeculativeSpeedup | None:
    """What `student`, loaded in the teacher's dtype, is worth as its draft model; decodes a few tokens.

    None where the models have too few positions to decode.
    """
    positions = teacher.config.max_position_embeddings
    prompts = held_out_prompts(documents, count=1, max_tokens=positions)
    prompt = prompts[0] if prompts else documents[0].token_ids.tolist()
    cost_ratio = measure_cost_ratio(teacher, student, prompt)
    return None if cost_ratio is None else best_speedup(figures.acceptance, cost_ratio)
