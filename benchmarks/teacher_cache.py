"""What a teacher's cache gains in training: tokens/s of each kind, beside the teacher itself, in one run.

python benchmarks/teacher_cache.py [--recipe recipes/quickstart.yaml] [--steps 3] [KEY=VALUE ...]

The same student takes the same steps from the teacher and from a cache of each kind, in turn, so that all of
them meet the same machine. Figures are those of the median step after a first one.
"""

import argparse
import statistics
import tempfile
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
from tessera_cli.distill.training.teacher_side import CachedTeacher, OnlineTeacher, TeacherSide
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
    parser = argparse.ArgumentParser(
        description="Training from a teacher's cache against the teacher itself."
    )
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--steps", type=int, default=3, help="measured steps, after a first one")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    home = Settings.from_env().home
    overrides = ["train.max_tokens=null", f"train.max_steps={options.steps + 1}", *options.overrides]
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
            device="cpu",
            listener=lambda event: None,
        )
        steps: dict[str, list[TrainStep]] = {name: [] for name in sides}
        num_tokens = 0
        for step in inputs.steps.steps():
            batches = [build_batch(inputs.train.documents[i] for row in b for i in row) for b in step]
            num_tokens += sum(len(batch.input_ids) for batch in batches)
            for name in sides:
                source.name = name
                figures = trainer.train_step(batches)
                if figures is not None:
                    steps[name].append(figures)
    print(
        f"{len(student.layers)} of {len(teacher.layers)} layers, {num_tokens:,} tokens, {options.steps} steps"
    )
    for name, taken in steps.items():
        step_ms, teacher_ms = (
            1000 * statistics.median(getattr(step, key) for step in taken[1:])
            for key in ("step_seconds", "teacher_seconds")
        )
        pairs = zip(steps["online"][1:], taken[1:], strict=True)
        gain = statistics.median(online.step_seconds / step.step_seconds for online, step in pairs)
        line = f"{name:<15} {step_ms:>7,.0f} ms/step, teacher {teacher_ms:>7,.1f} ms, {gain:.2f} x"
        print(f"{line}  {told.get(name, '')}")


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


if __name__ == "__main__":
    main()
