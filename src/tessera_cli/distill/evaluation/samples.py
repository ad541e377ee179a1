"""What teacher and student say to held-out prompts, and how fast, through the serving engine."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera_cli.distill.data.corpus import Document
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.tokenizer import Tokenizer

MAX_NEW_TOKENS = 96
NUM_SPEED_PROMPTS = 16


@dataclass(frozen=True)
class Sample:
    """The greedy answers of both models to one prompt."""

    prompt: str
    teacher: str
    student: str


@dataclass(frozen=True)
class Comparison:
    """Answers, and output tokens a second of both models for `num_speed_prompts` prompts at once."""

    samples: tuple[Sample, ...]
    num_speed_prompts: int
    teacher_tokens_per_second: float
    student_tokens_per_second: float


def held_out_prompts(documents: Sequence[Document], *, count: int, max_tokens: int) -> list[list[int]]:
    """Up to `count` prompts of at most `max_tokens`, in the documents' order.

    A prompt is all before a document's last answer. A document that is supervised from its start has none:
    its first quarter stands for it.
    """
    prompts: list[list[int]] = []
    for document in documents:
        if len(prompts) == count:
            break
        prompt = _prompt(document)
        if len(prompt) <= max_tokens:
            prompts.append(prompt)
    return prompts


def compare(
    teacher: Decoder,
    student: Decoder,
    tokenizer: Tokenizer,
    documents: Sequence[Document],
    *,
    num_samples: int,
) -> Comparison:
    """Let both models answer the same prompts, greedily and batched.

    Speed is measured on a second pass in which neither model stops early, so that both do the same work.
    Where no prompt leaves room for an answer, there are neither samples nor speeds.
    """
    positions = min(model.config.max_position_embeddings for model in (teacher, student))
    max_tokens = min(MAX_NEW_TOKENS, positions // 2)
    prompts = held_out_prompts(
        documents,
        count=max(num_samples, NUM_SPEED_PROMPTS),
        max_tokens=positions - max_tokens,
    )
    if not prompts:
        return Comparison((), 0, 0.0, 0.0)
    answers, speeds = [], []
    for decoder in (teacher, student):
        engine = engine_for(decoder, prompts, max_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        outputs = _generate(engine, prompts[:num_samples], params)
        answers.append([tokenizer.decode(token_ids).strip() for token_ids in outputs])
        engine.reset_prefix_cache()  # or the prompts of the first pass would cost nothing now
        forced = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = _generate(engine, prompts[:NUM_SPEED_PROMPTS], forced)
        seconds = time.perf_counter() - start
        speeds.append(sum(map(len, outputs)) / seconds)
    texts = [tokenizer.decode(prompt).strip() for prompt in prompts[:num_samples]]
    samples = tuple(Sample(*texts) for texts in zip(texts, *answers, strict=True))
    return Comparison(samples, len(prompts[:NUM_SPEED_PROMPTS]), *speeds)


def _prompt(document: Document) -> list[int]:
    supervised = document.supervised
    starts = np.flatnonzero(supervised[1:] & ~supervised[:-1]) + 1
    # The mask of a document without a prompt begins at its second token.
    end = int(starts[-1]) if starts[-1] > 1 else max(1, len(supervised) // 4)
    return document.token_ids[:end].tolist()


def engine_for(decoder: Decoder, prompts: Sequence[list[int]], max_tokens: int) -> Engine:
    """An engine that holds all `prompts` at once, each with an answer of `max_tokens`."""
    block_size = EngineConfig.block_size
    max_model_len = max(map(len, prompts)) + max_tokens
    num_blocks = 1 + len(prompts) * -(-max_model_len // block_size)
    return Engine(decoder, EngineConfig(num_blocks=num_blocks, max_model_len=max_model_len))


def _generate(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished():
        for output in engine.step():
            outputs[int(output.request_id)].extend(output.new_token_ids)
    return outputs
