"""The engine on a CUDA device: the tokens of captured decode steps, what these take, and a compiled prefill.

Part of `make gpu-check`; on a CPU the same code runs without a graph.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tessera_cli.engine.batch import build_batch
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.decode_graphs import DecodeGraphs
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from tessera_cli.engine.sequence import Sequence
from tessera_cli.errors import TesseraError
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder

SMOLLM2 = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=100000.0,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_ids=(),
    pad_token_id=None,
    dtype="bfloat16",
)
LLAMA_1B = replace(
    SMOLLM2,
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    rope_theta=500000.0,
)
MODELS = {"SmolLM2-135M": SMOLLM2, "Llama-3.2-1B": LLAMA_1B}
BATCHES = (1, 8, 64)
CONTEXT = 512
PREFILL = 2048
KINDS = ("eager", "padded", "graphs")
REPEATS = 30
NUM_REQUESTS = 40

Compile = Callable[..., Callable[..., Any]]


@dataclass(frozen=True)
class StepTime:
    """What one step of the engine, or one prefill, takes.

    Attributes:
        model: whose shape it has; the weights are random.
        step: what ran.
        implementation: how.
        milliseconds: the median, the host's share included.
    """

    model: str
    step: str
    implementation: str
    milliseconds: float


class HostShare:
    """An observer: `seconds` of each step in which the device has nothing to do, as nothing is overlapped."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step(self, *step: Any) -> None:
        timings = step[3]
        self.seconds.append(timings["schedule"] + timings["commit"])


def make_decoder(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
    """A decoder with random weights, the same each time."""
    torch.manual_seed(0)
    return Decoder(config, dtype=dtype, device=device).requires_grad_(False)


def build_engine(decoder: Decoder, config: EngineConfig, kind: str) -> Engine:
    """An engine whose decode steps run kernel by kernel, the same over padded inputs, or as graphs."""
    engine = Engine(decoder, config, enforce_eager=kind != "graphs")
    if kind == "padded":
        runner = engine._runner
        with torch.inference_mode():
            runner.decode_graphs = DecodeGraphs(runner._forward, lambda run: run, config, decoder.device)
    return engine


def check_tokens(config: ModelConfig, device: str) -> list[str]:
    """Hold captured decode steps to the same steps uncaptured; what fails, in a line each.

    In float32 to steps without padding. In bfloat16, where another number of rows rounds otherwise, to padded
    ones. Requests come and go, so that graphs of many sizes are replayed in no order.
    """
    failures = []
    for dtype, oracle in ((torch.float32, "eager"), (torch.bfloat16, "padded")):
        name = f"decode graphs against {oracle} steps in {str(dtype).removeprefix('torch.')}"
        decoder = make_decoder(config, dtype, device)
        try:
            expected, found = (tokens_of(decoder, kind) for kind in (oracle, "graphs"))
        except (TesseraError, RuntimeError) as error:
            failures.append(f"{name}: {error}")
            print(f"FAILED {failures[-1]}")
            continue
        different = [request for request, tokens in expected.items() if tokens != found[request]]
        print(f"{name}: {len(expected) - len(different)} of {len(expected)} requests have the same tokens")
        failures += [f"{name}: request {request}" for request in different]
    return failures


def tokens_of(decoder: Decoder, kind: str) -> dict[str, list[int]]:
    """Greedy answers of an engine of this `kind` to requests that arrive one a step, by request."""
    engine = build_engine(decoder, EngineConfig(num_blocks=400, max_model_len=512, max_num_seqs=24), kind)
    generator = torch.Generator().manual_seed(0)
    answers: dict[str, list[int]] = {str(index): [] for index in range(NUM_REQUESTS)}
    pending = list(answers)
    while pending or engine.has_unfinished():
        if pending:
            index = int(pending[0])
            prompt = torch.randint(decoder.config.vocab_size, (1 + 7 * (index % 13),), generator=generator)
            engine.add_request(pending.pop(0), prompt.tolist(), greedy(10 + 3 * (index % 20)))
        for output in engine.step():
            answers[output.request_id] += output.new_token_ids
    return answers


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens, ignore_eos=True)


def measure_models(device: str, failures: list[str]) -> list[StepTime]:
    """`measure` of all `MODELS` in bfloat16; what cannot be measured is added to `failures`."""
    steps = []
    for name, config in MODELS.items():
        try:
            for step in measure(name, make_decoder(config, torch.bfloat16, device)):
                steps.append(step)
        except (TesseraError, RuntimeError) as error:
            failures.append(f"{name}, after {steps[-1].step if steps else 'nothing'}: {error}")
            print(f"FAILED {failures[-1]}")
    return steps


def measure(
    name: str,
    decoder: Decoder,
    *,
    context: int = CONTEXT,
    prefill: int = PREFILL,
    compile: Compile = torch.compile,
) -> Iterator[StepTime]:
    """Decode steps of `BATCHES` sequences by every kind of engine; a prompt, by layers plain and compiled."""
    for batch in BATCHES:
        yield from _decode_times(name, decoder, batch, context)
    yield from _prefill_times(name, decoder, prefill, compile)


def _decode_times(name: str, decoder: Decoder, batch: int, context: int) -> Iterator[StepTime]:
    max_model_len = context + 8 * REPEATS
    num_blocks = 1 + batch * -(-max_model_len // EngineConfig.block_size)
    config = EngineConfig(num_blocks=num_blocks, max_model_len=max_model_len, max_num_seqs=batch)
    engines = {}
    for kind in KINDS:
        start = time.perf_counter()
        engines[kind] = build_engine(decoder, config, kind)
        yield StepTime(name, f"start for {batch}", kind, (time.perf_counter() - start) * 1e3)
    for engine in engines.values():
        _compute_prompts(engine, batch, context)
    step = f"decode {batch} x {context}"
    for kind, engine in engines.items():
        yield StepTime(name, step, kind, _milliseconds(engine.step, decoder.device))
    host = HostShare()
    engines["graphs"].observer = host
    _milliseconds(engines["graphs"].step, decoder.device)
    yield StepTime(name, step, "schedule + commit", statistics.median(host.seconds) * 1e3)


def _compute_prompts(engine: Engine, batch: int, context: int) -> None:
    """Let `engine` have so many sequences that decode."""
    generator = torch.Generator().manual_seed(0)
    for index in range(batch):
        prompt = torch.randint(engine.model_config.vocab_size, (context,), generator=generator).tolist()
        engine.add_request(str(index), prompt, greedy(8 * REPEATS))
    while engine.stats().prompt_tokens < batch * context:
        engine.step()


@torch.inference_mode()
def _prefill_times(name: str, decoder: Decoder, num_tokens: int, compile: Compile) -> Iterator[StepTime]:
    config = EngineConfig(num_blocks=1 + num_tokens, max_model_len=num_tokens)
    attention = Engine(decoder, config)._runner._attention
    sequence = Sequence("prompt", list(range(num_tokens)), greedy(1))
    sequence.block_table += range(1, 1 + config.blocks_for(num_tokens))
    scheduled = (ScheduledSequence(sequence, num_tokens, 0, 1),)
    output = SchedulerOutput(scheduled, (), (), num_tokens)
    batch = build_batch(output, block_size=config.block_size).to(decoder.device)

    @torch.compiler.disable
    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.attend(batch.metadata, layer, q, k, v)

    def run() -> Tensor:
        return decoder(batch.input_ids, batch.positions, attend)

    step = f"prefill {num_tokens}"
    yield StepTime(name, step, "eager", _milliseconds(run, decoder.device))
    for layer in decoder.layers:
        layer.forward = compile(layer.forward, dynamic=True)
    yield StepTime(name, step, "compiled prefill", _milliseconds(run, decoder.device))


def _milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    """The median time of a call until its device is done, after three calls that are not measured."""
    times = []
    for _ in range(3 + REPEATS):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:]) * 1e3


def print_table(times: list[StepTime]) -> None:
    """One line a measurement."""
    row = "{:16} {:18} {:18} {:>10}"
    print(row.format("model", "step", "implementation", "ms"))
    for one in times:
        print(row.format(one.model, one.step, one.implementation, f"{one.milliseconds:.3f}"))
