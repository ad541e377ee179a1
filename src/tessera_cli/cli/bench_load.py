"""The loads of `tessera bench`, measured one after the other and shown live."""

import os
import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from tessera_cli.cli.bench_report import BenchRun
from tessera_cli.cli.live import EngineView
from tessera_cli.cli.loading import LoadedModel
from tessera_cli.cli.output import Output
from tessera_cli.cli.prompt_line import Prompt
from tessera_cli.errors import DataError, UsageError
from tessera_cli.serving.baseline import TransformersBaseline
from tessera_cli.serving.benchmark import BenchmarkResult, run_benchmark
from tessera_cli.serving.workload import (
    DEFAULT_CONCURRENCY,
    BenchmarkRequest,
    check_lengths,
    greedy,
    random_requests,
)

# Keeps the prompts of the warm-up apart from the measured ones, whatever their number.
WARMUP_SEED_OFFSET = 1 << 32
_ENDS_EARLY = ("stop", "stop_token_ids", "structured_output")


@dataclass(frozen=True)
class Load:
    """What to ask of the engine; lengths count tokens, `request_rate` is per second."""

    num_prompts: int | None
    input_len: int
    prefix_len: int
    output_len: int
    range_ratio: float
    prompts: list[Prompt] | None
    n: int
    request_rate: float | None
    num_warmups: int | None
    repeat: int
    seed: int

    def requests(self, model: LoadedModel, concurrency: int | None) -> list[BenchmarkRequest]:
        """The measured requests.

        Raises:
            UsageError: more prompts are wanted than the file has.
        """
        if self.prompts is None:
            return self._random(
                model, self.num_prompts or 4 * (concurrency or DEFAULT_CONCURRENCY), self.seed
            )
        wanted = self.num_prompts or len(self.prompts)
        if wanted > len(self.prompts):
            raise UsageError(
                f"--num-prompts {wanted} is more than the {len(self.prompts)} of the prompt file",
                hint="leave --num-prompts out: each prompt is used once",
            )
        return [self._from_file(model, prompt) for prompt in self.prompts[:wanted]]

    def warmups(
        self, model: LoadedModel, requests: Sequence[BenchmarkRequest], concurrency: int | None
    ) -> list[BenchmarkRequest]:
        """As many as can be in flight at once, unless a number is given; they are of the same kind."""
        most = len(requests) if concurrency is None else min(concurrency, len(requests))
        wanted = most if self.num_warmups is None else self.num_warmups
        if self.prompts is None:
            return self._random(model, wanted, self.seed + WARMUP_SEED_OFFSET)
        return [requests[index % len(requests)] for index in range(wanted)]

    def _random(self, model: LoadedModel, num_requests: int, seed: int) -> list[BenchmarkRequest]:
        requests = random_requests(
            num_requests,
            input_len=self.input_len,
            prefix_len=self.prefix_len,
            output_len=self.output_len,
            range_ratio=self.range_ratio,
            vocab_size=model.config.vocab_size,
            seed=seed,
        )
        return [replace(request, params=replace(request.params, n=self.n)) for request in requests]

    def _from_file(self, model: LoadedModel, prompt: Prompt) -> BenchmarkRequest:
        tokenizer = model.llm.tokenizer
        if prompt.messages is None:
            token_ids = tokenizer.encode(prompt.text or "")
        elif tokenizer.chat_template is None:
            raise DataError(f"{prompt.source}: `messages`, but the model has no chat template")
        else:
            token_ids = tokenizer.encode_chat(prompt.messages, add_generation_prompt=True)
        _check_fields(prompt)
        return BenchmarkRequest(token_ids, prompt.params(replace(greedy(self.output_len), n=self.n)))


def _check_fields(prompt: Prompt) -> None:
    """Refuse what a line asks for and the benchmark would not do.

    Raises:
        DataError: the line has a field that ends answers early or that only `generate` looks at.
    """
    given: list[str] = [name for name in _ENDS_EARLY if name in prompt.sampling]
    given += [name for name in ("priority", "cache_salt") if getattr(prompt, name)]
    if prompt.sampling.get("ignore_eos") is False:
        given.append("ignore_eos")
    if given:
        raise DataError(
            f"{prompt.source}: `{given[0]}` has no place in a benchmark",
            hint="leave it out: answers come at once and in full length",
        )


def measure(
    model: LoadedModel,
    load: Load,
    levels: Sequence[int | None],
    *,
    with_baseline: bool,
    output: Output,
    live: bool,
    log_interval: float,
) -> list[BenchRun]:
    """Measure `load` at each concurrency of `levels`.

    Raises:
        UsageError: the load cannot be made, or not compared with the baseline.
        CapacityError: a request is longer than the model allows; found before any is run.
    """
    work = [load.requests(model, concurrency) for concurrency in levels]
    for requests in work:
        check_lengths(requests, model.llm.engine.config.max_model_len)
        plain = (replace(one.params, seed=None) == greedy(one.params.max_tokens) for one in requests)
        if with_baseline and not all(plain):
            raise UsageError(
                "--baseline compares one greedy answer to each prompt only",
                hint="leave --n out, and sampling fields but max_tokens out of the prompt file",
            )
    baseline = None
    runs = []
    for concurrency, requests in zip(levels, work, strict=True):
        warmups = load.warmups(model, requests, concurrency)
        if warmups:
            output.note(f"warm-up   {len(warmups)} requests")
            run_benchmark(model.llm.engine, warmups, concurrency=concurrency)
        repeats = []
        for _ in range(load.repeat):
            view = None
            if not output.is_quiet:
                view = EngineView(
                    output.console,
                    live=live,
                    title=model.title("bench"),
                    num_requests=len(requests),
                    start=model.llm.engine.stats(),
                    log_interval=log_interval,
                )
            repeats.append(_run(model, load, requests, concurrency, view))
        compared = None
        if with_baseline:
            batch_size = min(concurrency or len(requests), len(requests))
            output.note(f"baseline  transformers, batches of {batch_size}")
            if baseline is None:
                baseline = TransformersBaseline(model.path, dtype=model.dtype, device=model.device)
            if warmups:
                baseline.run(warmups, batch_size=batch_size)
            compared = baseline.run(requests, batch_size=batch_size)
        config = describe(model, load, len(requests), len(warmups))
        runs.append(BenchRun(concurrency, repeats, compared, config))
    return runs


def _run(
    model: LoadedModel,
    load: Load,
    requests: Sequence[BenchmarkRequest],
    concurrency: int | None,
    view: EngineView | None,
) -> BenchmarkResult:
    # Neither the warm-up nor an earlier run of the same prompts may make this one cheaper.
    model.llm.engine.reset_prefix_cache()
    with view or nullcontext():
        return run_benchmark(
            model.llm.engine,
            requests,
            concurrency=concurrency,
            request_rate=load.request_rate,
            seed=load.seed,
            on_step=None if view is None else view.on_step,
            on_finished=None if view is None else view.on_finished,
        )


def describe(model: LoadedModel, load: Load, num_prompts: int, num_warmups: int) -> dict[str, Any]:
    """What was run on what, so that a result can be read and repeated on its own."""
    import torch

    engine = model.llm.engine.config
    on_cuda = model.device.startswith("cuda")
    random_load = load.prompts is None
    return {
        "config": {
            "model": str(model.path),
            "dtype": model.dtype,
            "quantization": model.quantization,
            "attention_backend": model.attention_backend,
            "num_prompts": num_prompts,
            "num_warmups": num_warmups,
            "input_len": load.input_len if random_load else None,
            "prefix_len": load.prefix_len if random_load else None,
            "output_len": load.output_len,
            "range_ratio": load.range_ratio if random_load else None,
            "n": load.n,
            "request_rate": load.request_rate,
            "repeat": load.repeat,
            "seed": load.seed,
            "block_size": engine.block_size,
            "num_blocks": engine.num_blocks,
            "max_model_len": engine.max_model_len,
            "max_num_seqs": engine.max_num_seqs,
            "max_num_batched_tokens": engine.max_num_batched_tokens,
            "enable_chunked_prefill": engine.enable_chunked_prefill,
            "enable_prefix_caching": engine.enable_prefix_caching,
            "scheduling_policy": engine.scheduling_policy,
            "kv_cache_dtype": str(engine.kv_cache_dtype),
        },
        "versions": {
            "tessera": version("tessera-cli"),
            "torch": str(torch.__version__),
            "transformers": version("transformers"),
            "python": platform.python_version(),
        },
        "device": {
            "type": model.device,
            "name": torch.cuda.get_device_name(model.device) if on_cuda else platform.machine(),
            "num_cpus": os.cpu_count(),
            "num_threads": torch.get_num_threads(),
        },
    }
