"""Any student against any teacher, on documents of one's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tessera_cli.distill.data.corpus import load_corpus
from tessera_cli.distill.data.sources import check_source
from tessera_cli.distill.evaluation.evaluate import Evaluator, held_out_batches
from tessera_cli.distill.evaluation.measured import Measured, speculative_speedup
from tessera_cli.distill.students.student_config import common_rows
from tessera_cli.engine.sizing import select_device
from tessera_cli.errors import UsageError
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.loader import select_dtype
from tessera_cli.models.source import Notify, resolve_model
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.models.vocabulary import load_first_rows
from tessera_cli.recipe.data_section import DataSource

CHUNK_TOKENS = 256
ROWS_PER_BATCH = 4


def evaluate_pair(
    teacher: str,
    student: str,
    sources: Sequence[DataSource],
    *,
    limit: int,
    max_seq_len: int,
    train_on: Literal["completion", "all"],
    device: str,
    home: Path,
    offline: bool,
    notify: Notify | None = None,
) -> Measured:
    """Measure `student` against `teacher` on `sources`: as `evaluate_run` does, without an untrained student.

    Both are named like any model. `limit` counts supervised tokens, `max_seq_len` tokens of a document.

    Raises:
        ModelError: no such model, or two of different tokenizers.
        DataError: documents that cannot be read.
        UsageError: documents longer than a model's positions are asked for.
    """
    for source in sources:
        check_source(source)
    device = select_device(device)
    teacher_path, student_path = (
        resolve_model(model, home=home, offline=offline, notify=notify) for model in (teacher, student)
    )
    configs = ModelConfig.unquantised(teacher_path), ModelConfig.unquantised(student_path)
    for path, config in zip((teacher_path, student_path), configs, strict=True):
        if config.max_position_embeddings < max_seq_len:
            raise UsageError(
                f"documents of {max_seq_len} tokens are too long for {path}, which has "
                f"{config.max_position_embeddings} positions",
                hint=f"use --max-seq-len {config.max_position_embeddings}",
            )
    tokenizer = Tokenizer.from_dir(teacher_path)
    num_rows = common_rows(student_path, configs[1], configs[0], tokenizer)
    corpus = load_corpus(sources, tokenizer, max_seq_len=max_seq_len, train_on=train_on)
    batches = held_out_batches(
        corpus.documents, max_targets=limit, max_seq_len=max_seq_len, rows_per_batch=ROWS_PER_BATCH
    )
    dtype = select_dtype("auto", configs[0].dtype, device)
    models = [
        load_first_rows(path, num_rows, dtype=dtype, device=device) for path in (teacher_path, student_path)
    ]
    figures = Evaluator(models[0], batches, chunk_tokens=CHUNK_TOKENS).evaluate(models[1], step=0)
    speculative = speculative_speedup(models[0], models[1], figures, corpus.documents)
    return Measured(teacher_path, student_path, None, figures, speculative, tuple(corpus.notes("--data")))
