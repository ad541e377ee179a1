"""Engines over the tiny model, run to the end with their books checked after every step."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder

VOCAB_SIZE = 384


@dataclass
class Finished:
    """What an engine made of one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None


def tiny_decoder(path: Path) -> Decoder:
    """The tiny model in float32."""
    return load_decoder(path, dtype=torch.float32)


def make_engine(
    decoder: Decoder,
    *,
    num_blocks: int = 200,
    block_size: int = 4,
    max_model_len: int = 128,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    enable_chunked_prefill: bool = True,
) -> Engine:
    """An engine whose sizes are small enough to matter."""
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
    )
    return Engine(decoder, config)


def run_to_end(engine: Engine) -> dict[str, Finished]:
    """Step until nothing is unfinished; the outputs by request id."""
    outputs: dict[str, Finished] = {}
    while engine.has_unfinished():
        for output in engine.step():
            finished = outputs.setdefault(output.request_id, Finished())
            finished.token_ids += output.new_token_ids
            finished.finish_reason = output.finish_reason
            finished.error = output.error
        engine._scheduler.check_invariants()
    assert engine.stats().num_used_blocks == 0
    assert not engine._requests
    return outputs


def run_requests(
    engine: Engine, requests: Mapping[str, tuple[list[int], SamplingParams]]
) -> dict[str, Finished]:
    """Add all `requests` (prompt and params by id), then run to the end."""
    for request_id, (prompt, params) in requests.items():
        engine.add_request(request_id, prompt, params)
    return run_to_end(engine)


def random_prompts(lengths: SequenceOf[int], *, seed: int = 0) -> list[list[int]]:
    """Prompts of the given lengths, without the tiny model's special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def greedy(max_tokens: int, *, ignore_eos: bool = True) -> SamplingParams:
    """Greedy decoding of `max_tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
