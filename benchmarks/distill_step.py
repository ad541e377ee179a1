"""Training steps from a teacher and from its caches, beside what the machine could do at best, in one run.

python benchmarks/distill_step.py [--recipe recipes/smollm2-half.yaml] [--steps 3] [KEY=VALUE ...]

The same student takes the same steps from the teacher and from a cache of each kind, in turn, and products of
matrices are timed between them, so that all meet the same machine. A step's efficiency is the floating-point
operations that it needs (`forward_flops`, three times for the student) over its time and the rate of those
products, of 1024 x 1024 matrices, which is told. Figures are medians over the steps after a first one.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tessera_cli.distill.data.corpus import TrainBatch, build_batch
from tessera_cli.distill.events import TrainStep
from tessera_cli.distill.inputs import read_inputs
from tessera_cli.distill.students.student import build_student
from tessera_cli.distill.teacher_cache.build import open_caches
from tessera_cli.distill.teacher_cache.plan import plan_caches
from tessera_cli.distill.teacher_cache.targets import Targets
from tessera_cli.distill.training.processes import Processes
from tessera_cli.distill.training.teacher_side import CachedTeacher, OnlineTeacher, TeacherSide
from tessera_cli.distill.training.throughput import forward_flops
from tessera_cli.distill.training.trainer import Trainer
from tessera_cli.models.loader import load_decoder, select_dtype
from tessera_cli.recipe.loader import load_recipe
from tessera_cli.settings import Settings

KINDS = {
    "hidden float32": ["teacher.cache.kind=hidden", "teacher.cache.dtype=float32"],
    "hidden float16": ["teacher.cache.kind=hidden"],
    "topk 64": ["teacher.cache.kind=topk"],
    "sample 50": ["teacher.cache.kind=sample"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps from a teacher and its caches.")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/smollm2-half.yaml"))
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after a first one")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    home = Settings.from_env().home
    # Which layers makes no difference to time, and finding the important ones takes some.
    overrides = ["student.layers=even", "train.max_tokens=null", f"train.max_steps={options.steps + 1}"]
    overrides += options.overrides
    recipe = load_recipe(options.recipe, overrides).recipe
    inputs = read_inputs(recipe, home=home, offline=True)
    dtype = select_dtype(recipe.teacher.dtype, inputs.teacher.config.dtype, "cpu")
    teacher = load_decoder(inputs.teacher.path, dtype=dtype)
    student = build_student(teacher, inputs.student.layers or ())
    fingerprints = inputs.fingerprints()
    sides: dict[str, TeacherSide] = {"online": OnlineTeacher(teacher)}
    told: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, keys in KINDS.items():
            cached = replace(inputs, recipe=load_recipe(options.recipe, [*overrides, *keys]).recipe)
            plan, _ = plan_caches(
                cached,
                [],
                run_fingerprints=fingerprints,
                teacher_dtype=dtype,
                home=Path(directory),
            )
            (cache,) = open_caches([plan], lambda: teacher, lambda event: None)
            figures = cache.figures
            told[name] = (
                f"{figures.bytes_per_token:,.0f} B, mass {figures.kept_mass:.1%}, KL {figures.kl:.2g}"
            )
            sides[name] = CachedTeacher(cache.reader, teacher.head_weight)
        source = _Switched(sides)
        trainer = Trainer(
            student,
            source,
            loss=recipe.loss,
            train=recipe.train.model_copy(update={"max_steps": len(sides) * (options.steps + 1)}),
            num_steps=len(sides) * (options.steps + 1),
            processes=Processes("cpu"),
            listener=lambda event: None,
        )
        steps: dict[str, list[TrainStep]] = {name: [] for name in sides}
        efficiency: dict[str, list[float]] = {name: [] for name in sides}
        num_tokens, all_rates = 0, []
        for step in inputs.steps.steps():
            batches = [build_batch(inputs.train.documents[i] for row in b for i in row) for b in step]
            num_tokens += sum(len(batch.input_ids) for batch in batches)
            for name in sides:
                source.name = name
                rates = [_product_rate()]
                figures = trainer.train_step(batches)
                if figures is not None:
                    flops = 3 * forward_flops(student.config, batches) + source.flops(batches)
                    steps[name].append(figures)
                    rates.append(_product_rate())
                    efficiency[name].append(flops / figures.step_seconds / statistics.mean(rates))
                    all_rates += rates
    print(
        f"{len(student.layers)} of {len(teacher.layers)} layers, {num_tokens:,} tokens, "
        f"{options.steps} steps, products at {statistics.median(all_rates) / 1e9:,.0f} GFLOP/s"
    )
    parts = ("step_seconds", "teacher_seconds", "student_seconds", "loss_seconds")
    print(f"{'':15}  {'ms: step':>9}  teacher  student     loss   tok/s   gain  efficiency")
    for name, taken in steps.items():
        taken = taken[1:]
        times = [1000 * statistics.median(getattr(step, part) for step in taken) for part in parts]
        pairs = zip(steps["online"][1:], taken, strict=True)
        gain = statistics.median(online.step_seconds / step.step_seconds for online, step in pairs)
        speed = statistics.median(step.tokens_per_second for step in taken)
        columns = [f"{name:15}", f"{times[0]:>9,.0f}", *(f"{value:>7,.0f}" for value in times[1:])]
        columns += [f"{speed:>6,.0f}", f"{gain:>5.2f}x", f"{statistics.median(efficiency[name][1:]):>6.0%}"]
        print("  ".join(columns), f"  {told.get(name, '')}")


def _product_rate(size: int = 1024, seconds: float = 0.5) -> float:
    """FLOP/s of products of square matrices over a while: at its side the step meets the same neighbours."""
    left, right = torch.randn(2, size, size)
    out, start, count = torch.empty_like(left), time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        torch.mm(left, right, out=out)
        count += 1
    return 2 * size**3 * count / (time.perf_counter() - start)


class _Switched(CachedTeacher):
    """One of several sources of the same teacher, for one trainer: its optimiser's state is there once."""

    def __init__(self, sides: dict[str, TeacherSide]) -> None:
        self.vocab_size = sides["online"].vocab_size
        self.name = "online"
        self._sides = sides

    def to(self, device: torch.device) -> None:
        for side in self._sides.values():
            side.to(device)

    def targets(self, batch: TrainBatch) -> Targets:
        return self._sides[self.name].targets(batch)

    def flops(self, batches: Sequence[TrainBatch]) -> int:
        return self._sides[self.name].flops(batches)


if __name__ == "__main__":
    main()
