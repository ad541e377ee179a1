"""What the engine remembers of one live request beside its sequences."""

from collections.abc import Iterable
from dataclasses import replace

from tessera_cli.engine.scheduler_output import ScheduledSequence
from tessera_cli.engine.sequence import SampleError, Sequence
from tessera_cli.engine.stats import RequestMetrics
from tessera_cli.engine.step_result import PromptLogprobs, TokenLogprobs
from tessera_cli.engine.structured_output import Matcher


class LiveRequest:
    """One request between `add_request` and the end of its last sample.

    Attributes:
        metrics: of each of its samples, by child index.
        matchers: where each of its samples stands in the structured output; empty if it has none.
    """

    def __init__(self, num_prompt_tokens: int, arrival_time: float, start: Matcher | None) -> None:
        self.metrics = {0: RequestMetrics(arrival_time=arrival_time)}
        self.matchers: dict[int, Matcher] = {}
        self._start = start
        self._num_computed_prompt_tokens = 0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = [None] * num_prompt_tokens
        if start is not None:
            self.matchers[0] = start.fork()

    def record(self, item: ScheduledSequence, started: float) -> int:
        """Note that a step ran some of it; the prompt tokens that were done for the first time.

        Those that the prefix cache gave count as done; those that are computed again do not.
        """
        metrics = self.metrics[item.sequence.child_index]
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = started
            metrics.num_cached_tokens = item.sequence.num_cached_tokens
        done = min(item.start + item.num_scheduled_tokens, item.sequence.num_prompt_tokens)
        new = max(done - self._num_computed_prompt_tokens, 0)
        self._num_computed_prompt_tokens += new
        return new

    def fork(self, num_samples: int) -> None:
        """Give the samples after the first what the first has so far."""
        for index in range(1, num_samples):
            self.metrics[index] = replace(self.metrics[0], token_times=[])
            if self.matchers:
                self.matchers[index] = self.matchers[0].fork()

    def add_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """Keep those of one step."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[chunk.start : chunk.start + len(chunk.rows)] = chunk.rows

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """All of them, position 0 with None; None if they were taken before."""
        taken, self._prompt_logprobs = self._prompt_logprobs, None
        return None if taken is None else tuple(taken)

    def accept(self, index: int, token: int | SampleError) -> bool:
        """Let sample `index` follow its token; whether its form is then complete, with no text to follow."""
        matcher = self.matchers.get(index)
        if matcher is None or isinstance(token, SampleError):
            return False
        matcher.accept(token)
        return matcher.is_finished

    def rewind(self, sequences: Iterable[Sequence]) -> None:
        """Go to where the live `sequences` are, after a step that was undone or whose outputs are lost."""
        self.matchers = {}
        for sequence in sequences:
            index = sequence.child_index
            if index not in self.metrics:
                self.metrics[index] = replace(self.metrics[0], token_times=[])
            if self._start is not None:
                matcher = self.matchers[index] = self._start.fork()
                for token in sequence.output_token_ids:
                    matcher.accept(token)
