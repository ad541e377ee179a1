"""What each kind of teacher cache costs in quality: the same student after the same steps, in one run.

python -m benchmarks.distill_cache_gaps [--steps 50] [--recipe FILE] [-o DIRECTORY] [KEY=VALUE ...]

Half of the teacher's layers, evenly spread, learn from the teacher itself and from a cache of each kind.
Writes held-out KLs over the full vocabulary, and whether the weights are those of the uncached run byte for
byte, into results.md in the directory of -o. What an uncached run comes to whose first weights are rounded to
float16 says how much of a gap is chance. Sequences are short, so that 50 steps are minutes on a CPU.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.distill_step import KINDS
from benchmarks.results_page import write_section
from tessera_cli import __version__
from tessera_cli.distill.data.corpus import TrainBatch, build_batch
from tessera_cli.distill.evaluation.evaluate import Evaluator, held_out_batches
from tessera_cli.distill.inputs import RunInputs, read_inputs
from tessera_cli.distill.students.student import build_student
from tessera_cli.distill.teacher_cache.build import open_caches
from tessera_cli.distill.teacher_cache.plan import plan_caches
from tessera_cli.distill.training.processes import Processes
from tessera_cli.distill.training.teacher_side import CachedTeacher
from tessera_cli.distill.training.trainer import Trainer
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder
from tessera_cli.recipe.loader import load_recipe
from tessera_cli.settings import Settings, prepare_process

SHORT = ["data.max_seq_len=128", "train.micro_batch_size=1", "eval.max_tokens=600", "train.num_epochs=null"]


@dataclass(frozen=True)
class Row:
    """What came of a source: held-out KL to the teacher and to the uncached student, nats a token."""

    name: str
    bytes_per_token: float | None
    kl: float
    kl_to_online: float
    same_bytes: bool


def main() -> None:
    parser = argparse.ArgumentParser(description="The same student from the teacher and from its caches.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/smollm2-half.yaml"))
    parser.add_argument("-o", "--output-dir", type=Path, default=Path("docs"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    prepare_process(offline=True)
    home = Settings.from_env().home
    length = ["student.layers=even", "train.max_tokens=null", f"train.max_steps={options.steps}"]
    overrides = [*length, *SHORT, *options.overrides]
    recipe = load_recipe(options.recipe, overrides).recipe
    inputs = read_inputs(recipe, home=home, offline=True)
    teacher = load_decoder(inputs.teacher.path, dtype=torch.float32)
    steps = [[build_batch(documents) for documents in step] for step in inputs.step_documents()]
    held_out = held_out_batches(
        inputs.eval.documents,
        max_targets=recipe.eval.max_tokens,
        max_seq_len=recipe.data.max_seq_len,
        rows_per_batch=1,
    )
    evaluator = Evaluator(teacher, held_out, chunk_tokens=recipe.train.loss_chunk_tokens)
    online = train(inputs, teacher, teacher, steps)
    to_online = Evaluator(online, held_out, chunk_tokens=recipe.train.loss_chunk_tokens)
    rows = [Row("the teacher itself", None, evaluator.evaluate(online, step=0).kl, 0.0, True)]
    tell(rows[0])
    rounded = train(inputs, teacher, teacher, steps, rounds_start=True)
    kl, kl_to_online = (e.evaluate(rounded, step=0).kl for e in (evaluator, to_online))
    rows.append(Row("the teacher itself, first weights rounded to float16", None, kl, kl_to_online, False))
    tell(rows[1])
    for name, keys in KINDS.items():
        with tempfile.TemporaryDirectory() as directory:
            cached = replace(inputs, recipe=load_recipe(options.recipe, [*overrides, *keys]).recipe)
            plan, _ = plan_caches(
                cached,
                [],
                run_fingerprints=inputs.fingerprints(),
                teacher_dtype=torch.float32,
                home=Path(directory),
            )
            (cache,) = open_caches([plan], lambda: teacher, lambda event: None)
            student = train(inputs, teacher, CachedTeacher(cache.reader, teacher.head_weight), steps)
            rows.append(
                Row(
                    name,
                    cache.figures.bytes_per_token,
                    evaluator.evaluate(student, step=0).kl,
                    to_online.evaluate(student, step=0).kl,
                    same_bytes(student, online),
                )
            )
            tell(rows[-1])
    start = evaluator.evaluate(build_student(teacher, inputs.student.layers or ()), step=0)
    text = described(rows, options, steps, start.kl, start.num_tokens)
    print(text)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    write_section(options.output_dir / "results.md", "What a teacher's cache costs", text)


def train(
    inputs: RunInputs,
    teacher: Decoder,
    side: Decoder | CachedTeacher,
    steps: list[list[TrainBatch]],
    *,
    rounds_start: bool = False,
) -> Decoder:
    """A student fresh from the teacher's layers, after `steps` with `side`."""
    student = build_student(teacher, inputs.student.layers or ())
    if rounds_start:
        for parameter in student.parameters():
            parameter.data = parameter.data.half().float()
    trainer = Trainer(
        student,
        side,
        loss=inputs.recipe.loss,
        train=inputs.recipe.train,
        num_steps=len(steps),
        processes=Processes("cpu"),
        listener=lambda event: None,
    )
    for batches in steps:
        trainer.train_step(batches)
    return student


def same_bytes(student: Decoder, other: Decoder) -> bool:
    """Whether every weight of both has the same bits."""
    ours, theirs = student.state_dict(), other.state_dict()
    return all(
        torch.equal(ours[name].contiguous().view(torch.uint8), theirs[name].contiguous().view(torch.uint8))
        for name in theirs
    )


def tell(row: Row) -> None:
    print(f"{row.name}: held-out KL {row.kl:.5f}, same bytes {row.same_bytes}", file=sys.stderr, flush=True)


def described(
    rows: list[Row], options: argparse.Namespace, steps: list[list[TrainBatch]], start: float, num_tokens: int
) -> str:
    """The section."""
    supervised = sum(len(batch.target_ids) for step in steps for batch in step)
    header = ("targets from", "bytes/token", "held-out KL", "gap", "KL from the uncached student", "weights")
    cells = [header, ("---",) * len(header)]
    for row in rows:
        size = "" if row.bytes_per_token is None else f"{row.bytes_per_token:,.0f}"
        same = "" if row is rows[0] else "the same bytes" if row.same_bytes else "others"
        gap = "" if row is rows[0] else f"{row.kl - rows[0].kl:+.4f}"
        cells.append((row.name, size, f"{row.kl:.4f}", gap, f"{row.kl_to_online:.1e}", same))
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    words = ["python -m benchmarks.distill_cache_gaps", f"--steps {options.steps}", *options.overrides]
    return f"""The same student after the same {len(steps)} steps ({supervised:,} supervised tokens) from the
teacher and from its caches: KL(teacher ‖ student) on {num_tokens:,} held-out tokens over the full
vocabulary at T = 1, nats a token; before training it is {start:.4f}. A gap is to the run without a cache,
and the last column compares every weight with its. The second row is no cache at all:
a gap of its size is what a change of the last digits makes of so short a run.

{table}

Tessera {__version__}, torch {torch.__version__}, {torch.get_num_threads()} thread(s), one seed:

```bash
{" ".join(words)}
```
"""


if __name__ == "__main__":
    main()
