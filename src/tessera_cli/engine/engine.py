"""The engine: requests in, tokens out, one step at a time."""

import dataclasses
import secrets
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.model_runner import ModelRunner
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.scheduler_output import ScheduledSequence
from tessera_cli.engine.sequence import FinishReason, SampleError, Sequence
from tessera_cli.engine.sizing import (
    Capacity,
    check_positions,
)
from tessera_cli.engine.stats import EngineStats, RequestMetrics
from tessera_cli.errors import UsageError
from tessera_cli.kernels.backend import select_backend
from tessera_cli.models.decoder import Decoder


@dataclass(frozen=True)
class SequenceOutput:
    """What one step did for one request; `metrics` come with the `finish_reason`.

    The last of `new_token_ids` is the stop token where the reason is `STOP`.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None
    metrics: RequestMetrics | None


@dataclass
class _Request:
    """What the engine remembers of a live request beside its sequence."""

    metrics: RequestMetrics
    num_computed_prompt_tokens: int = 0


class Engine:
    """Continuous batching of one decoder over one paged KV cache; used from one thread.

    Attributes:
        config: the sizes it was built with.
        notes: lines that the user should see: what was chosen on their behalf.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        attention_backend: str = "auto",
        notes: SequenceOf[str] = (),
    ) -> None:
        """Serve `decoder`, whose weights may go on being trained between steps, on its own device.

        Raises:
            CapacityError: `config.max_model_len` is more than the model's positions, or the KV cache is more
                than the device's memory.
            UsageError: no such attention backend.
        """
        check_positions(config.max_model_len, decoder.config)
        backend, _ = select_backend(attention_backend, decoder.head_weight.device.type)
        self.config = config
        self.notes = list(notes)
        self._vocab_size = decoder.config.vocab_size
        # The runner first: a pool too large for the device's tensors is too large for the scheduler's lists.
        self._runner = ModelRunner(decoder, config, backend)
        self._scheduler = Scheduler(config, decoder.config.eos_token_ids)
        self._requests: dict[str, _Request] = {}
        self._num_finished = 0
        self._num_failed = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._num_steps = 0

    @property
    def capacity(self) -> Capacity:
        """What the KV cache holds."""
        return Capacity.of(self.config)

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Queue a request; without a seed it gets a fresh one.

        Raises:
            UsageError: an empty prompt, an id that is in use, or token ids outside the vocabulary.
            CapacityError: the prompt leaves no room for output in `max_model_len`.
        """
        for name, token_ids in (("a prompt", prompt_token_ids), ("stop_token_ids", params.stop_token_ids)):
            bad = next((token for token in token_ids if not 0 <= token < self._vocab_size), None)
            if bad is not None:
                raise UsageError(
                    f"request {request_id!r} has {name} with token id {bad}",
                    hint=f"the model's ids go from 0 to {self._vocab_size - 1}",
                )
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(63))
        self._scheduler.add(Sequence(request_id, prompt_token_ids, params))
        self._requests[request_id] = _Request(RequestMetrics(arrival_time=time.monotonic()))

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks; no output follows. False if there is none of that id."""
        was_live = self._scheduler.abort(request_id)
        self._requests.pop(request_id, None)
        return was_live

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.has_unfinished()

    def step(self) -> list[SequenceOutput]:
        """Schedule, run, sample and commit once.

        After an exception the step is undone, and the next call computes it again. Ctrl-C may come when the
        tokens are already committed: they are lost with the outputs, and the books balance all the same.

        Returns:
            An output for each request that got a token or ended, oldest request first.
        """
        try:
            output = self._scheduler.schedule()
            started = time.monotonic()
            sampled = self._runner.run(output) if output.scheduled else {}
            finished = self._scheduler.commit(output, sampled)
            self._num_steps += bool(output.scheduled)
            # A request that was aborted meanwhile is forgotten already.
            kept = [item for item in output.scheduled if not item.sequence.aborted]
            self._record(kept, started)
            outputs = [
                self._output(item.sequence, sampled[item.sequence.request_id])
                for item in kept
                if item.samples
            ]
            self._count(finished)
        except BaseException:  # Ctrl-C included, which may come between any two lines
            self._scheduler.rollback()
            raise
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of what the engine holds and has done."""
        usable = self.config.num_usable_blocks
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_preemptions=self._scheduler.num_preemptions,
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            num_blocks=usable,
            num_used_blocks=usable - self._scheduler.block_pool.num_free_blocks,
            block_size=self.config.block_size,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            num_steps=self._num_steps,
        )

    def _record(self, scheduled: SequenceOf[ScheduledSequence], started: float) -> None:
        """Note when requests were first scheduled, and the prompt tokens computed for the first time."""
        for item in scheduled:
            request = self._requests[item.sequence.request_id]
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = started
            computed = min(item.start + item.num_scheduled_tokens, item.sequence.num_prompt_tokens)
            new = max(computed - request.num_computed_prompt_tokens, 0)
            request.num_computed_prompt_tokens += new
            self._prompt_tokens += new

    def _output(self, sequence: Sequence, token: int | SampleError) -> SequenceOutput:
        now = time.monotonic()
        metrics = self._requests[sequence.request_id].metrics
        new_token_ids: tuple[int, ...] = ()
        if not isinstance(token, SampleError):
            new_token_ids = (token,)
            metrics.token_times.append(now)
            self._generation_tokens += 1
        if sequence.finish_reason is None:
            return SequenceOutput(sequence.request_id, new_token_ids, None, None, None)
        metrics.finished_time = now
        return SequenceOutput(
            sequence.request_id, new_token_ids, sequence.finish_reason, sequence.error, metrics
        )

    def _count(self, finished: list[Sequence]) -> None:
        for sequence in finished:
            self._requests.pop(sequence.request_id, None)
            self._num_failed += sequence.finish_reason is FinishReason.ERROR
            self._num_finished += sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
