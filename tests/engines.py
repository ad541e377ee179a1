"""Engines over the tiny model, run to the end with their books checked after every step."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.step_result import TokenLogprobs
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder

VOCAB_SIZE = 384


@dataclass
class Finished:
    """What an engine made of one sample of a request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    stop_reason: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


def tiny_decoder(path: Path) -> Decoder:
    """The tiny model in float32."""
    return load_decoder(path, dtype=torch.float32)


def make_engine(decoder: Decoder, *, options: Mapping[str, Any] | None = None, **sizes: Any) -> Engine:
    """An engine whose `sizes` are small enough to matter; `options` are those of `Engine` itself."""
    defaults: dict[str, Any] = {
        "num_blocks": 200,
        "block_size": 4,
        "max_model_len": 128,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
    }
    return Engine(decoder, EngineConfig(**defaults | sizes), **options or {})


def run_samples(engine: Engine) -> dict[str, list[Finished]]:
    """Step until nothing is unfinished; the outputs by request id and child index."""
    outputs: dict[str, dict[int, Finished]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            finished = outputs.setdefault(output.request_id, {}).setdefault(output.index, Finished())
            assert finished.finish_reason is None, "an output after the end"
            finished.token_ids += output.new_token_ids
            finished.logprobs += output.logprobs
            finished.prompt_logprobs = output.prompt_logprobs or finished.prompt_logprobs
            finished.finish_reason = output.finish_reason
            finished.stop_reason = output.stop_reason
            finished.error = output.error
        engine._scheduler.check_invariants()
    assert engine.stats().num_used_blocks == 0
    assert not engine._records.requests
    return {
        request_id: [samples[index] for index in sorted(samples)] for request_id, samples in outputs.items()
    }


def run_to_end(engine: Engine) -> dict[str, Finished]:
    """Step until nothing is unfinished; the only sample of each request."""
    outputs = run_samples(engine)
    assert all(len(samples) == 1 for samples in outputs.values())
    return {request_id: samples[0] for request_id, samples in outputs.items()}


def add_requests(engine: Engine, requests: Mapping[str, tuple[list[int], SamplingParams]]) -> None:
    """Add all `requests`: prompt and params by id."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)


def run_requests(
    engine: Engine, requests: Mapping[str, tuple[list[int], SamplingParams]]
) -> dict[str, Finished]:
    """Add all `requests` (prompt and params by id), then run to the end."""
    add_requests(engine, requests)
    return run_to_end(engine)


def random_prompts(lengths: SequenceOf[int], *, seed: int = 0) -> list[list[int]]:
    """Prompts of the given lengths, without the tiny model's special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def greedy(max_tokens: int, *, ignore_eos: bool = True) -> SamplingParams:
    """Greedy decoding of `max_tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
