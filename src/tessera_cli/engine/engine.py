"""The engine: requests in, tokens out, one step at a time."""

import secrets
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

from tessera_cli.engine.admission import check_prompt
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.model_runner import ModelRunner
from tessera_cli.engine.observer import StepObserver
from tessera_cli.engine.request_records import RequestRecords
from tessera_cli.engine.sampling_params import SamplingParams, check_against_vocabulary
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import FinishReason, Sequence, SequenceKey
from tessera_cli.engine.sequence_output import SequenceOutput
from tessera_cli.engine.sizing import Capacity, check_positions
from tessera_cli.engine.snapshot import EngineSnapshot, take_snapshot
from tessera_cli.engine.stats import EngineStats
from tessera_cli.engine.step_result import StepResult
from tessera_cli.engine.structured_output import GrammarVocabulary
from tessera_cli.errors import UsageError
from tessera_cli.kernels.backend import select_backend
from tessera_cli.models.causal_lm import CausalLM

__all__ = ["Engine", "SequenceOutput"]


class Engine:
    """Continuous batching of one model over one paged KV cache; used from one thread.

    Attributes:
        config: the sizes it was built with.
        model_config: what the model says of itself.
        attention_backend: the name of the one that runs, and the reason for it.
        observer: told of every committed step.
        notes: lines that the user should see: what was chosen on their behalf.
        scheduled_request_ids: one for each sequence of the last step, also where the step failed; none where
            it failed before it was scheduled.
    """

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        *,
        attention_backend: str = "auto",
        enforce_eager: bool = True,
        grammar_vocabulary: GrammarVocabulary | None = None,
        observer: StepObserver | None = None,
        notes: SequenceOf[str] = (),
    ) -> None:
        """Serve `model` on its own device; its weights may go on being trained between steps.

        Whoever changes the weights calls `reset_prefix_cache`. Structured output needs `grammar_vocabulary`;
        `observer` is told of every committed step. Without `enforce_eager` decode steps on CUDA are captured
        as graphs, which read the weights where they lie now: neither they nor the layers may be replaced.

        Raises:
            CapacityError: `config.max_model_len` is more than the model's positions, or the KV cache is more
                than the device's memory.
            UsageError: no such attention backend.
            RunError: the graphs cannot be captured.
        """
        check_positions(config.max_model_len, model.config)
        self.attention_backend = select_backend(
            attention_backend,
            model.device.type,
            layers=model.attention_layers,
            block_size=config.block_size,
            dtype=model.dtype,
        )
        self.config = config
        self.model_config = model.config
        self.notes = list(notes)
        self._vocab_size = model.config.vocab_size
        self._has_eos = any(token < self._vocab_size for token in model.config.eos_token_ids)
        self._grammar_vocabulary = grammar_vocabulary
        self.observer = observer
        # The runner first: a pool too large for the device's tensors is too large for the scheduler's lists.
        self._runner = ModelRunner(model, config, self.attention_backend[0], enforce_eager=enforce_eager)
        self._scheduler = Scheduler(config, model.config.eos_token_ids)
        self._records = RequestRecords()
        self._num_steps = 0
        self.scheduled_request_ids: tuple[str, ...] = ()

    @property
    def capacity(self) -> Capacity:
        """What the KV cache holds."""
        return Capacity.of(self.config)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request; without a seed it gets a fresh one.

        Args:
            request_id: unlike that of any live request.
            prompt_token_ids: at least one.
            params: how to sample and when to end.
            priority: under the policy "priority", the lower the sooner.
            cache_salt: only requests of the same salt find what it leaves in the prefix cache.

        Raises:
            UsageError: an empty prompt, an id that is in use, token ids outside the vocabulary, a priority
                under "fcfs", or a structured output that cannot be compiled.
            CapacityError: the prompt leaves no room for output in `max_model_len`, or more samples than can
                run at once.
        """
        prompt_token_ids = check_prompt(prompt_token_ids, self._vocab_size)
        check_against_vocabulary(params, self._vocab_size)
        matcher = None
        if params.structured_output is not None:
            if self._grammar_vocabulary is None:
                raise UsageError(
                    "structured output needs the text of the tokens, and this engine has no tokenizer",
                    hint="load the engine from a directory with a tokenizer.json",
                )
            matcher = self._grammar_vocabulary.compile(params.structured_output)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        sequence = Sequence(request_id, prompt_token_ids, params, priority=priority, cache_salt=cache_salt)
        self._scheduler.check(sequence)
        with self._mended():
            self._scheduler.add(sequence)
            self._records.add(sequence, matcher)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its blocks; no output follows. False if there is none of that id."""
        with self._mended():
            was_live = self._scheduler.abort(request_id)
            self._records.requests.pop(request_id, None)
        return was_live

    def finish(self, request_id: str, index: int) -> bool:
        """End one sample between steps, as if it had met a stop token; no output follows.

        False if it is not live.
        """
        with self._mended():
            sequence = self._scheduler.finish(request_id, index, FinishReason.STOP)
            if sequence is not None:
                self._records.count([sequence], self._scheduler.queues.requests)
        return sequence is not None

    def reset_prefix_cache(self) -> None:
        """Let nothing that was computed before be found; needed when the weights change."""
        with self._mended():
            self._scheduler.reset_prefix_cache()

    def has_unfinished(self) -> bool:
        """Whether a request waits or runs."""
        return self._scheduler.has_unfinished()

    def step(self) -> list[SequenceOutput]:
        """Schedule, run, sample and commit once.

        After an exception the step is undone, and the next call computes it again. Ctrl-C may come, and the
        observer fail, after the commit: the tokens are lost with the outputs, and the books balance.

        Returns:
            An output for each sequence that got a token or ended, best rank first, samples in their order.
        """
        with self._mended():
            times = [time.monotonic()]
            self.scheduled_request_ids = ()
            output = self._scheduler.schedule()
            self.scheduled_request_ids = tuple(item.sequence.request_id for item in output.scheduled)
            times.append(time.monotonic())
            result = StepResult()
            if output.scheduled:
                result = self._runner.run(output, self._records.matchers())
            times.append(time.monotonic())
            finished = self._scheduler.commit(output, result.tokens)
            times.append(time.monotonic())
            outputs = self._take(output, result, finished, started=times[1])
            self._num_steps += bool(output.scheduled)
            if self.observer is not None and output.scheduled:
                timings = {
                    part: end - start
                    for part, (start, end) in zip(("schedule", "run", "commit"), pairwise(times), strict=True)
                }
                self.observer.on_step(output, result.tokens, finished, timings, self.stats())
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of what the engine holds and has done."""
        usable = self.config.num_usable_blocks
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_finished=self._records.num_finished,
            num_failed=self._records.num_failed,
            num_blocks=usable,
            num_used_blocks=usable - scheduler.block_pool.num_free_blocks,
            num_cached_blocks=scheduler.block_pool.num_cached_blocks,
            block_size=self.config.block_size,
            prompt_tokens=self._records.prompt_tokens,
            generation_tokens=self._records.generation_tokens,
            num_steps=self._num_steps,
            prefix_cache_queries=scheduler.prefix_cache.num_queries,
            prefix_cache_hits=scheduler.prefix_cache.num_hits,
            num_forks=scheduler.num_forks,
            num_block_copies=scheduler.num_block_copies,
        )

    def snapshot(self) -> EngineSnapshot:
        """What every sequence and every block is at; between steps, as all else."""
        scheduler = self._scheduler
        latencies = self._records.latencies
        return take_snapshot(scheduler.queues, scheduler.block_pool, self.stats(), latencies)

    @contextmanager
    def _mended(self) -> Iterator[None]:
        """Undo a step that fails, and mend what Ctrl-C leaves half done; it comes between any two lines."""
        try:
            yield
        except BaseException:
            self._scheduler.rollback()
            live = self._scheduler.queues.requests
            for request_id in live.keys() - self._records.requests.keys():
                self._scheduler.abort(request_id)
            self._records.rewind(live)
            raise

    def _take(
        self, output: SchedulerOutput, result: StepResult, finished: list[Sequence], *, started: float
    ) -> list[SequenceOutput]:
        """Turn a committed step into outputs, and let the records follow it."""
        live = self._scheduler.queues.requests
        self._records.follow(output, result, started)
        samples: dict[SequenceKey, Sequence] = {}
        for item in output.scheduled:
            if item.num_samples > 1:
                samples.update((s.key, s) for s in live.get(item.sequence.request_id, ()))
                samples.update((s.key, s) for s in finished if s.request_id == item.sequence.request_id)
        for request_id, index in self._records.accept(output, result):
            # Without an end-of-sequence token no token can say that the form is complete.
            if not self._has_eos:
                sequence = self._scheduler.finish(request_id, index, FinishReason.STOP)
                finished += [sequence] if sequence is not None else []
        outputs = self._records.outputs(output, result, samples)
        self._records.count(finished, live)
        return outputs
