"""The same requests through `transformers` in static batches: what continuous batching is compared with."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tessera_cli.errors import RunError, UsageError
from tessera_cli.serving.workload import BenchmarkRequest


@dataclass(frozen=True)
class BaselineResult:
    """Requests in order, in batches of `batch_size`; `output_token_ids` are those that were asked for.

    A static batch runs until its longest answer is done: tokens beyond a request's own length are thrown away
    and not counted, so both sides are credited with the same work. `duration` is seconds, loading excluded.
    """

    batch_size: int
    duration: float
    total_output_tokens: int
    output_token_ids: list[list[int]]

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration


class TransformersBaseline:
    """`AutoModelForCausalLM.generate`, greedy, end tokens ignored, left padding, KV cache on.

    Args:
        path: the model's directory.
        dtype: the engine's dtype by torch's name, so that both compute the same.

    Raises:
        UsageError: transformers cannot load it.
    """

    def __init__(self, path: Path, *, dtype: str, device: str) -> None:
        from transformers import AutoModelForCausalLM, GenerationConfig
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                str(path), dtype=dtype, local_files_only=True
            )
        except OSError as error:  # such as int8 weights, which it does not know
            raise UsageError(
                f"transformers cannot load {path}: {str(error).splitlines()[0]}", hint="leave --baseline out"
            ) from error
        self.model.to(device).eval()
        # The model's own generation settings would bring its end tokens and sampling back.
        self.model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
        self.device = device

    def run(
        self,
        requests: Sequence[BenchmarkRequest],
        *,
        batch_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> BaselineResult:
        """Answer `requests` in full.

        Raises:
            UsageError: a request samples, so that the two sides would not do the same work.
            RunError: `generate` stopped early.
        """
        if any(request.params.temperature > 0 for request in requests):
            raise UsageError("the transformers baseline is greedy only", hint="leave the temperature at 0")
        start = clock()
        outputs: list[list[int]] = []
        for first in range(0, len(requests), batch_size):
            outputs += self._generate(requests[first : first + batch_size])
        return BaselineResult(
            batch_size=batch_size,
            duration=clock() - start,
            total_output_tokens=sum(map(len, outputs)),
            output_token_ids=outputs,
        )

    def _generate(self, batch: Sequence[BenchmarkRequest]) -> list[list[int]]:
        width = max(len(request.prompt_token_ids) for request in batch)
        num_tokens = max(request.params.max_tokens for request in batch)
        input_ids = torch.zeros(len(batch), width, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, request in enumerate(batch):
            num_prompt = len(request.prompt_token_ids)
            input_ids[row, width - num_prompt :] = torch.tensor(request.prompt_token_ids)
            attention_mask[row, width - num_prompt :] = 1
        with torch.inference_mode():
            ids = self.model.generate(
                input_ids=input_ids.to(self.device),
                attention_mask=attention_mask.to(self.device),
                max_new_tokens=num_tokens,
            )
        if ids.shape[1] != width + num_tokens:
            raise RunError(f"transformers stopped after {ids.shape[1] - width} of {num_tokens} tokens")
        answers = ids[:, width:].tolist()
        return [ids[: request.params.max_tokens] for ids, request in zip(answers, batch, strict=True)]
