"""Where the time of a training step goes, in seconds of one thread, which hardly depend on other work.

python -m benchmarks.distill_profile [--recipe FILE] [KEY=VALUE ...]

A first step, then one whose every torch operation is timed by the processor time of its thread. The ratio is
the operations that the step needs (`forward_flops`, three times for the student, once for the teacher) over
its time, beside the rate of products of 1024 x 1024 matrices before and after it, by the same clock.
"""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tessera_cli.distill.data.corpus import build_batch
from tessera_cli.distill.inputs import read_inputs
from tessera_cli.distill.students.student import build_student
from tessera_cli.distill.training.processes import Processes
from tessera_cli.distill.training.throughput import forward_flops
from tessera_cli.distill.training.trainer import Trainer
from tessera_cli.models.loader import load_decoder, select_dtype
from tessera_cli.recipe.loader import load_recipe
from tessera_cli.settings import Settings, prepare_process

PARTS = (
    "products in the layers",
    "products with a head",
    "attention",
    "other operations on logits or heads",
    "optimiser and clipping",
    "other operations",
    "outside of operations",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Where a training step's time goes, on one thread.")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/smollm2-half.yaml"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepare_process(offline=True)
    fixed = ["student.layers=even", "train.max_tokens=null", "train.max_steps=2"]
    recipe = load_recipe(options.recipe, [*fixed, *options.overrides]).recipe
    inputs = read_inputs(recipe, home=Settings.from_env().home, offline=True)
    dtype = select_dtype(recipe.teacher.dtype, inputs.teacher.config.dtype, "cpu")
    teacher = load_decoder(inputs.teacher.path, dtype=dtype)
    student = build_student(teacher, inputs.student.layers or ())
    trainer = Trainer(
        student,
        teacher,
        loss=recipe.loss,
        train=recipe.train,
        num_steps=2,
        processes=Processes("cpu"),
        listener=lambda event: None,
    )
    first, batches = ([build_batch(documents) for documents in step] for step in inputs.step_documents())
    trainer.train_step(first)
    rates = [product_rate()]
    watch = Watch(student.config.vocab_size)
    start = time.thread_time()
    with watch:
        trainer.train_step(batches)
    seconds = time.thread_time() - start
    rates.append(product_rate())
    watch.seconds["outside of operations"] = seconds - sum(watch.seconds.values())
    flops = 3 * forward_flops(student.config, batches) + forward_flops(teacher.config, batches)
    tokens = sum(len(batch.input_ids) for batch in batches)
    targets = sum(len(batch.target_ids) for batch in batches)
    print(f"{len(student.layers)} of {len(teacher.layers)} layers, {tokens:,} tokens, {targets:,} supervised")
    for part in PARTS:
        took = watch.seconds[part]
        rate = f"{watch.flops[part] / took / 1e9:>6.1f} GFLOP/s" if watch.flops[part] else ""
        print(f"{part:36} {took:>7.2f} s  {took / seconds:>6.1%}  {rate}")
    rate = sum(rates) / len(rates)
    print(
        f"the step: {flops / 1e9:,.0f} GFLOP in {seconds:.1f} s, {flops / seconds / 1e9:.1f} GFLOP/s; "
        f"products of 1024 x 1024: {rate / 1e9:.1f}; ratio {flops / seconds / rate:.0%}"
    )


class Watch(TorchDispatchMode):
    """Processor time of each operation run in it, and operations of products, by part."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self.seconds: dict[str, float] = defaultdict(float)
        self.flops: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.thread_time()
        result = function(*args, **(kwargs or {}))
        took = time.thread_time() - start
        name = function.overloadpacket.__name__
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        part = self._part(name, tensors)
        self.seconds[part] += took
        if part.startswith("products"):
            left, right = tensors[-2:]
            outputs = right.shape[0] if name == "linear" else right.shape[1]
            self.flops[part] += 2 * left.numel() * outputs
        return result

    def _part(self, name: str, tensors: list[torch.Tensor]) -> str:
        vocabulary = any(self._vocab_size in tensor.shape or self._is_of_head(tensor) for tensor in tensors)
        if name in ("mm", "addmm", "addmm_", "linear"):
            return "products with a head" if vocabulary else "products in the layers"
        if "scaled_dot_product" in name:
            return "attention"
        if name.startswith(("_foreach", "_fused_adamw")):
            return "optimiser and clipping"
        return "other operations on logits or heads" if vocabulary else "other operations"

    def _is_of_head(self, tensor: torch.Tensor) -> bool:
        """Whether it is a part of a head, which is multiplied by parts."""
        whole = self._vocab_size * tensor.shape[-1] * tensor.element_size() if tensor.ndim == 2 else 0
        return tensor.untyped_storage().nbytes() == whole


def product_rate(size: int = 1024, repeats: int = 10) -> float:
    """FLOP/s of products of square matrices, in the processor time of this thread."""
    left, right = torch.randn(2, size, size)
    out = torch.empty_like(left)
    torch.mm(left, right, out=out)
    start = time.thread_time()
    for _ in range(repeats):
        torch.mm(left, right, out=out)
    return 2 * size**3 * repeats / (time.thread_time() - start)


if __name__ == "__main__":
    main()
