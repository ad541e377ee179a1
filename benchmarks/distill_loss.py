"""The chunked loss beside a plain one over all logits: time, memory and distance, in one run.

python benchmarks/distill_loss.py [--tokens 4096 8192] [--vocab 49152] [--hidden 576] [--repeats 2]

The plain loss is three lines of torch and autograd. Each takes its turn in the same process, so that both
meet the same machine; memory is the peak that the process reached above what it held before (Linux only).
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import kl_div, linear, log_softmax

from tessera_cli.distill.losses.dense import chunked_distillation_loss
from tessera_cli.recipe.schema import LossSection


def main() -> None:
    parser = argparse.ArgumentParser(description="The chunked forward KL against one over all logits.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192], help="supervised tokens")
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576, help="width of both models")
    parser.add_argument("--chunk", type=int, default=256, help="train.loss_chunk_tokens")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    print(
        f"forward KL, vocabulary {options.vocab:,}, width {options.hidden}, chunks of {options.chunk} tokens"
    )
    print(
        f"{'tokens':>7}  {'':7}  {'s':>6}  {'peak MiB':>9}  {'time':>7}  {'memory':>7}  gradients differ by"
    )
    for num_tokens in options.tokens:
        _compare(num_tokens, options)


def _compare(num_tokens: int, options: argparse.Namespace) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    heads = [0.1 * normal(options.vocab, options.hidden) for _ in range(2)]
    student, teacher = normal(2, num_tokens, options.hidden)
    leaves = [student.requires_grad_(), heads[0].requires_grad_()]
    target_ids = torch.zeros(num_tokens, dtype=torch.int64)

    def plain() -> Tensor:
        p, q = log_softmax(linear(teacher, heads[1]), -1), log_softmax(linear(*leaves), -1)
        return kl_div(q, p, log_target=True, reduction="sum") / num_tokens

    def chunked() -> Tensor:
        sums = chunked_distillation_loss(
            *leaves, teacher, heads[1], target_ids, loss=LossSection(), chunk_tokens=options.chunk
        )
        return sums.loss / num_tokens

    losses = {"plain": plain, "chunked": chunked}
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    peaks: dict[str, list[int]] = {name: [] for name in losses}
    gradients: dict[str, tuple[Tensor, ...]] = {}
    for _ in range(options.repeats):
        for name, loss in losses.items():
            gradients.pop(name, None)
            took, peak, gradients[name] = _measured(lambda loss=loss: torch.autograd.grad(loss(), leaves))
            seconds[name].append(took)
            peaks[name].append(peak)
    pairs = zip(gradients["plain"], gradients["chunked"], strict=True)
    distance = max(((a - b).norm() / a.norm()).item() for a, b in pairs)
    for name in losses:
        took, peak = statistics.median(seconds[name]), statistics.median(peaks[name])
        line = f"{num_tokens:>7,}  {name:7}  {took:>6.2f}  {peak / 2**20:>9,.0f}"
        if name == "chunked":
            time_ratio = statistics.median(
                b / a for a, b in zip(seconds["plain"], seconds[name], strict=True)
            )
            memory_ratio = peak / statistics.median(peaks["plain"])
            line += f"  {time_ratio:>6.2f}x  {memory_ratio:>7.1%}  {distance:.1e}"
        print(line, flush=True)


def _measured(work: Callable[[], tuple[Tensor, ...]]) -> tuple[float, int, tuple[Tensor, ...]]:
    """Seconds, peak bytes above what the process held before, and the result."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, start = _status("VmRSS"), time.perf_counter()
    result = work()
    return time.perf_counter() - start, _status("VmHWM") - before, result


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    main()
