"""The engine's records of its live requests, and the outputs that a committed step becomes."""

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from tessera_cli.engine.live_request import LiveRequest
from tessera_cli.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from tessera_cli.engine.sequence import FinishReason, SampleError, Sequence, SequenceKey
from tessera_cli.engine.sequence_output import SequenceOutput
from tessera_cli.engine.stats import LatencyTotals
from tessera_cli.engine.step_result import StepResult, TokenLogprobs
from tessera_cli.engine.structured_output import Matcher


class RequestRecords:
    """What is remembered of each live request, and what is counted over all there ever were.

    Attributes:
        requests: by request id.
        num_finished: sequences that ended by a stop token or their length.
        num_failed: sequences that ended with an error.
        prompt_tokens: prompt tokens done, each once.
        generation_tokens: tokens sampled.
        latencies: how long they took.
    """

    def __init__(self) -> None:
        self.requests: dict[str, LiveRequest] = {}
        self.num_finished = 0
        self.num_failed = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.latencies = LatencyTotals()

    def add(self, sequence: Sequence, matcher: Matcher | None) -> None:
        """Start a record, with the matcher at the start of its structured output if it has one."""
        self.requests[sequence.request_id] = LiveRequest(
            sequence.num_prompt_tokens, time.monotonic(), matcher
        )

    def matchers(self) -> dict[SequenceKey, Matcher]:
        """Where every sequence with a structured output stands in it."""
        return {
            (request_id, index): matcher
            for request_id, request in self.requests.items()
            for index, matcher in request.matchers.items()
        }

    def follow(self, output: SchedulerOutput, result: StepResult, started: float) -> None:
        """Note what a step that began at `started` computed, and fork what it forked."""
        for item in self._kept(output):
            request = self.requests[item.sequence.request_id]
            self.prompt_tokens += request.record(item, started)
            if (chunk := result.prompt_logprobs.get(item.sequence.key)) is not None:
                request.add_prompt_logprobs(chunk)
            request.fork(item.num_samples)

    def outputs(
        self, output: SchedulerOutput, result: StepResult, samples: Mapping[SequenceKey, Sequence]
    ) -> list[SequenceOutput]:
        """An output for each sampled token, or the lack of one; `samples` has the sequences of forks."""
        outputs = []
        for item in self._kept(output):
            if not item.num_samples:
                continue
            request_id, first = key = item.sequence.key
            logprobs = iter(result.logprobs.get(key, ()))
            for index, token in enumerate(result.tokens[key], start=first):
                sequence = item.sequence if index == first else samples[request_id, index]
                has_logprobs = sequence.params.logprobs is not None and not isinstance(token, SampleError)
                own = (next(logprobs),) if has_logprobs else ()
                outputs.append(self._output(sequence, token, own))
        return outputs

    def accept(self, output: SchedulerOutput, result: StepResult) -> list[SequenceKey]:
        """Let the matchers follow the sampled tokens; the keys of those whose form is now complete."""
        complete = []
        for item in self._kept(output):
            request_id, first = item.sequence.key
            request = self.requests[request_id]
            if item.num_samples and request.matchers:
                for index, token in enumerate(result.tokens[request_id, first], start=first):
                    if request.accept(index, token):
                        complete.append((request_id, index))
        return complete

    def count(self, finished: Iterable[Sequence], live: Mapping[str, SequenceOf[Sequence]]) -> None:
        """Count who ended, and forget the requests that have no `live` sample."""
        for sequence in finished:
            self.num_failed += sequence.finish_reason is FinishReason.ERROR
            self.num_finished += sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            if sequence.request_id not in live:
                self.requests.pop(sequence.request_id, None)
            elif sequence.request_id in self.requests:
                self.requests[sequence.request_id].matchers.pop(sequence.child_index, None)

    def rewind(self, live: Mapping[str, SequenceOf[Sequence]]) -> None:
        """Bring the records to where the `live` sequences are after a rollback."""
        for request_id in list(self.requests):
            if request_id in live:
                self.requests[request_id].rewind(live[request_id])
            else:
                del self.requests[request_id]

    def _kept(self, output: SchedulerOutput) -> list[ScheduledSequence]:
        """What the step ran, less those that were aborted meanwhile and are forgotten."""
        return [item for item in output.scheduled if not item.sequence.aborted]

    def _output(
        self, sequence: Sequence, token: int | SampleError, logprobs: tuple[TokenLogprobs, ...]
    ) -> SequenceOutput:
        now = time.monotonic()
        request = self.requests[sequence.request_id]
        metrics = request.metrics[sequence.child_index]
        prompt_logprobs = None
        if sequence.params.prompt_logprobs is not None and sequence.child_index == 0:
            prompt_logprobs = request.take_prompt_logprobs()
        new_token_ids: tuple[int, ...] = ()
        if not isinstance(token, SampleError):
            new_token_ids = (token,)
            metrics.token_times.append(now)
            self.latencies.count_last_of(metrics)
            self.generation_tokens += 1
        is_over = sequence.finish_reason is not None
        if is_over:
            metrics.finished_time = now
        return SequenceOutput(
            sequence.request_id,
            sequence.child_index,
            new_token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
            metrics=metrics if is_over else None,
        )
