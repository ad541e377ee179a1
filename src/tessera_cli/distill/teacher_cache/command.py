"""A recipe's teacher cache, apart from any run."""

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tessera_cli.distill.evaluation.evaluate import held_out_batches
from tessera_cli.distill.events import Listener, Note, StageStarted
from tessera_cli.distill.generation.teacher_answers import read_answered_inputs
from tessera_cli.distill.teacher_cache.build import open_caches
from tessera_cli.distill.teacher_cache.figures import CacheFigures
from tessera_cli.distill.teacher_cache.keys import batch_documents
from tessera_cli.distill.teacher_cache.plan import plan_caches
from tessera_cli.distill.teacher_cache.verify import Verification, require_complete, verify_cache
from tessera_cli.engine.sizing import select_device
from tessera_cli.models.loader import select_dtype
from tessera_cli.models.vocabulary import load_first_rows
from tessera_cli.recipe.schema import Recipe


@dataclass(frozen=True)
class CacheReport:
    """What a cache is, and what its verification found if there was one."""

    figures: CacheFigures
    verification: Verification | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the same names, for JSON."""
        verification = None if self.verification is None else asdict(self.verification)
        return self.figures.as_dict() | {"verification": verification}


def cache_recipe(
    recipe: Recipe, *, verify: bool, listener: Listener, device: str, offline: bool, home: Path
) -> list[CacheReport]:
    """Complete the caches of `recipe`, of its training and its held-out documents; or only verify them.

    Raises:
        UsageError: whatever can be known before the teacher runs; a directory that is another cache.
        DataError: there is damage, or to verify something is missing.
        RunError: the file system refuses.
        KeyboardInterrupt: the user stopped it; what is complete is kept.
    """
    device = select_device(device)
    listener(StageStarted("prepare"))
    inputs = read_answered_inputs(recipe, home=home, offline=offline, device=device, listener=listener)
    for note in inputs.notes:
        listener(Note(note))
    dtype = select_dtype(recipe.teacher.dtype, inputs.teacher.config.dtype, device)
    held_out = held_out_batches(
        inputs.eval.documents,
        max_targets=recipe.eval.max_tokens,
        max_seq_len=recipe.data.max_seq_len,
        rows_per_batch=recipe.train.micro_batch_size,
    )
    plans = plan_caches(
        inputs,
        [batch_documents(batch) for batch in held_out],
        run_fingerprints=inputs.fingerprints(),
        teacher_dtype=dtype,
        home=home,
    )
    num_rows = inputs.student.config.vocab_size
    load_teacher = partial(load_first_rows, inputs.teacher.path, num_rows, dtype=dtype, device=device)
    if verify:
        require_complete(plans)
    caches = open_caches(plans, load_teacher, listener)
    if not verify:
        return [CacheReport(cache.figures, None) for cache in caches]
    listener(StageStarted("verify"))
    teacher = load_teacher()
    return [CacheReport(cache.figures, verify_cache(cache.plan, teacher, listener)) for cache in caches]
