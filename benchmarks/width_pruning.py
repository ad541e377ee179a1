"""What activations are worth against drawing lots when a teacher is narrowed, before any training.

python benchmarks/width_pruning.py TEACHER_DIRECTORY
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tessera_cli.distill.data.corpus import build_batch, load_corpus
from tessera_cli.distill.evaluation.evaluate import Evaluator, held_out_batches
from tessera_cli.distill.students.activation_importance import ActivationImportance, activation_importance
from tessera_cli.distill.students.width_pruning import build_narrow_student, choose_width
from tessera_cli.models.loader import load_decoder
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.data_section import DataSource

DOCUMENTS = Path(__file__).parents[1] / "recipes" / "data" / "train.jsonl"
CALIBRATION_TOKENS, HELD_OUT_TOKENS = 2_048, 600
WIDTHS: dict[str, dict[str, Any]] = {
    "everything": {},
    "3/4 of the neurons": {"intermediate_size": 1_152},
    "2/3 of the heads": {"num_attention_heads": 6, "num_key_value_heads": 2},
    "8/9 of the channels": {"hidden_size": 512},
}


def main(path: Path) -> None:
    teacher = load_decoder(path, dtype=torch.float32)
    source = DataSource(path=str(DOCUMENTS), format="messages")
    corpus = load_corpus([source], Tokenizer.from_dir(path), max_seq_len=512, train_on="all")
    judged, num_tokens = [], 0
    for document in corpus.documents[:40]:
        if num_tokens < CALIBRATION_TOKENS:
            judged.append(build_batch([document]))
            num_tokens += len(document.token_ids)
    held_out = held_out_batches(
        corpus.documents[40:], max_targets=HELD_OUT_TOKENS, max_seq_len=512, rows_per_batch=1
    )
    evaluator = Evaluator(teacher, held_out, chunk_tokens=256)
    by_activation = activation_importance(teacher, judged)
    generator = torch.Generator().manual_seed(0)
    by_lot = ActivationImportance(
        *(
            torch.rand(scores.shape, generator=generator, dtype=torch.float64)
            for scores in (by_activation.hidden, by_activation.neurons, by_activation.heads)
        )
    )
    layers = range(teacher.config.num_hidden_layers)
    for name, widths in WIDTHS.items():
        student = replace(teacher.config, **widths)
        figures = []
        for importance in (by_activation, by_lot):
            choice = choose_width(importance, layers, teacher.config, student)
            figures.append(evaluator.evaluate(build_narrow_student(teacher, choice), step=0))
        by_activations, lots = figures
        print(
            f"{name:<20} {student.num_parameters / 1e6:6.1f} M   KL by activations {by_activations.kl:.3f}, "
            f"by lot {lots.kl:.3f}, on {lots.num_tokens} tokens",
            flush=True,
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
