"""Runs what the scheduler chose: tokens and what the model thought of them come out, no sequence changes."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from tessera_cli.engine.batch import Batch, build_batch, staged
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.decode_graphs import CudaCapture, DecodeGraphs
from tessera_cli.engine.forward import build_forward
from tessera_cli.engine.logprobs import token_logprobs
from tessera_cli.engine.sampler import SampleRow, sample, uniform
from tessera_cli.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from tessera_cli.engine.sequence import SampleError, SequenceKey
from tessera_cli.engine.step_result import PromptLogprobs, StepResult, TokenLogprobs
from tessera_cli.engine.structured_output import Matcher
from tessera_cli.errors import CapacityError, RunError
from tessera_cli.kernels.backend import build_attention
from tessera_cli.kernels.kv_cache import select_kv_cache_dtype
from tessera_cli.models.causal_lm import CausalLM
from tessera_cli.models.decoder import Decoder

# Logits are computed for so many rows at once at most: 64 MB for a vocabulary of 65,536 tokens.
MAX_LOGITS_ROWS = 256

_NO_MATCHERS: Mapping[SequenceKey, Matcher] = MappingProxyType({})


class ModelRunner:
    """Holds a model and the KV cache of its layers, on the model's device.

    Attributes:
        decode_graphs: what runs the steps that it takes; None where every step is run kernel by kernel: asked
            for by `enforce_eager`, or the kernels or the model are none that are known to be capturable.

    Raises:
        CapacityError: the device has no memory for the KV cache.
        RunError: the graphs cannot be captured.
    """

    def __init__(
        self, model: CausalLM, config: EngineConfig, backend: str, *, enforce_eager: bool = True
    ) -> None:
        self._model = model
        self._config = config
        self._device = model.device
        self._eos_token_ids = frozenset(
            token for token in model.config.eos_token_ids if token < model.config.vocab_size
        )
        try:
            self._attention = build_attention(
                backend,
                model.attention_layers,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                dtype=model.dtype,
                kv_cache_dtype=select_kv_cache_dtype(config.kv_cache_dtype, model.dtype),
                device=model.device,
            )
        except (RuntimeError, TypeError) as error:  # out of memory, or a size beyond 64 bits
            raise CapacityError(
                f"a KV cache of {config.num_blocks} blocks of {config.block_size} tokens does not fit into"
                f" the memory of {model.device}",
                hint="lower kv_cache_memory or num_blocks",
            ) from error
        self._forward = build_forward(model, self._attention, backend)
        self.decode_graphs: DecodeGraphs | None = None
        if backend == "cuda" and isinstance(model, Decoder) and not enforce_eager:
            self.decode_graphs = self._capture()

    @torch.inference_mode()
    def _capture(self) -> DecodeGraphs:
        try:
            return DecodeGraphs(self._forward, CudaCapture(self._device), self._config, self._device)
        except RuntimeError as error:
            raise RunError(
                f"the CUDA graphs of decode steps cannot be captured: {str(error).splitlines()[0]}",
                hint="where memory is short, give the KV cache less: lower kv_cache_memory or num_blocks, or"
                " gpu_memory_utilization where neither is given; or set enforce_eager",
            ) from error

    @torch.inference_mode()
    def run(
        self, output: SchedulerOutput, matchers: Mapping[SequenceKey, Matcher] = _NO_MATCHERS
    ) -> StepResult:
        """Compute a step that schedules at least one token.

        Args:
            output: what to run; its block copies come first.
            matchers: where the sequences with a structured output stand in it; they are read, not advanced.
        """
        if output.block_copies:
            self._attention.copy_blocks(output.block_copies)
        batch = build_batch(output, block_size=self._config.block_size)
        if self.decode_graphs is not None and self.decode_graphs.takes(batch):
            hidden = self.decode_graphs(batch)
        else:
            hidden = self._forward(batch.to(self._device))
        result = StepResult()
        self._sample(output, batch, hidden, matchers, result)
        self._score_prompts(output, batch, hidden, result)
        return result

    def _sample(
        self,
        output: SchedulerOutput,
        batch: Batch,
        hidden: Tensor,
        matchers: Mapping[SequenceKey, Matcher],
        result: StepResult,
    ) -> None:
        """Sample after the last token of each sequence that samples."""
        sampling = [
            (item, first + item.num_scheduled_tokens - 1)
            for item, first in zip(output.scheduled, batch.first_rows, strict=True)
            if item.num_samples
        ]
        for begin in range(0, len(sampling), MAX_LOGITS_ROWS):
            chunk = sampling[begin : begin + MAX_LOGITS_ROWS]
            items = [item for item, _ in chunk]
            logits = self._model.logits(_take(hidden, [row for _, row in chunk]))
            rows = [_sample_row(item, matchers.get(item.sequence.key)) for item in items]
            tokens = sample(logits, rows, eos_token_ids=self._eos_token_ids)
            result.tokens.update(
                (item.sequence.key, sampled) for item, sampled in zip(items, tokens, strict=True)
            )
            result.logprobs.update(_logprobs(items, tokens, logits))

    def _score_prompts(
        self, output: SchedulerOutput, batch: Batch, hidden: Tensor, result: StepResult
    ) -> None:
        """Log-probabilities of the prompt tokens that this step predicts, where they are asked for."""
        for item, first in zip(output.scheduled, batch.first_rows, strict=True):
            sequence, num_top = item.sequence, item.sequence.params.prompt_logprobs
            # A sequence with output was preempted: its prompt's were told with the first token.
            if num_top is None or sequence.num_output_tokens:
                continue
            # Each row predicts the position after its own; what follows the prompt's last token is output.
            start = max(item.start + 1, sequence.params.prompt_logprobs_start)
            end = min(item.start + 1 + item.num_scheduled_tokens, sequence.num_prompt_tokens)
            rows: list[TokenLogprobs | None] = []
            for begin in range(start, end, MAX_LOGITS_ROWS):
                token_ids = sequence.token_ids[begin : min(begin + MAX_LOGITS_ROWS, end)]
                offset = first + begin - item.start - 1
                logits = self._model.logits(hidden[offset : offset + len(token_ids)])
                scored = token_logprobs(logits, [[token] for token in token_ids], [num_top] * len(token_ids))
                rows += [row[0] if row is not None else None for row in scored]
            result.prompt_logprobs[sequence.key] = PromptLogprobs(start, tuple(rows))


def _take(hidden: Tensor, rows: list[int]) -> Tensor:
    """The ascending `rows` of `hidden`: all of them in a decode step, which needs neither copy nor index."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return hidden[rows[0] : rows[-1] + 1]
    index = staged(torch.tensor(rows), hidden.device)
    return hidden[index.to(hidden.device, non_blocking=True)]


def _sample_row(item: ScheduledSequence, matcher: Matcher | None) -> SampleRow:
    sequence = item.sequence
    seed = sequence.params.seed
    if seed is None:
        raise ValueError(f"request {sequence.request_id!r} has no seed; Engine.add_request draws one")
    # At a fork the row is child 0's, and the samples are those of children 0, 1, ...
    children = range(sequence.child_index, sequence.child_index + item.num_samples)
    uniforms = [uniform(seed, child, sequence.num_tokens) for child in children]
    return SampleRow(sequence.params, uniforms, sequence.token_ids, sequence.num_prompt_tokens, matcher)


def _logprobs(
    items: list[ScheduledSequence], tokens: list[list[int | SampleError]], logits: Tensor
) -> dict[SequenceKey, list[TokenLogprobs]]:
    """Of the sampled tokens, for the sequences that ask for them and got tokens."""
    asked: list[tuple[int, list[int], int]] = []
    for row, (item, sampled) in enumerate(zip(items, tokens, strict=True)):
        token_ids = [token for token in sampled if not isinstance(token, SampleError)]
        num_top = item.sequence.params.logprobs
        if num_top is not None and token_ids:
            asked.append((row, token_ids, num_top))
    if not asked:
        return {}
    rows, token_ids_of, num_top_of = zip(*asked, strict=True)
    scored = token_logprobs(logits[list(rows)], token_ids_of, num_top_of)
    return {
        items[row].sequence.key: entries
        for row, entries in zip(rows, scored, strict=True)
        if entries is not None
    }
