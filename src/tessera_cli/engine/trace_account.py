"""What a trace amounts to: preemptions with their price, what each request went through, the peaks."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tessera_cli.engine.trace_reader import Key, Trace, TracedStep


@dataclass
class Preemption:
    """A sequence that lost its blocks in `step`, and what that cost.

    `num_computed_tokens` were in its cache; `num_recomputed_tokens` of them had to be computed again, which
    is None as long as it has not run again. `admitted` are the sequences that came in at the same step.
    """

    step: int
    key: Key
    num_computed_tokens: int
    num_output_tokens: int
    admitted: tuple[Key, ...]
    num_recomputed_tokens: int | None = None

    @property
    def reason(self) -> str:
        """Why, as far as a trace tells: whoever comes in where somebody has to go outranks him."""
        if self.admitted:
            return "made room for " + ", ".join(map(name_of, self.admitted))
        return "KV blocks ran short for those ahead of it"


@dataclass
class SequenceAccount:
    """One sequence's way through the trace; `num_cached_tokens` came from the prefix cache at admission."""

    first_step: int
    num_cached_tokens: int
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_scheduled_tokens: int = 0
    last_step: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None


@dataclass
class TraceAccount:
    """The whole trace in numbers; `seconds` add up the parts of all steps, `duration` is wall time."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_output_tokens: int = 0
    num_block_copies: int = 0
    duration: float = 0.0
    seconds: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    tokens_per_step: Counter[int] = field(default_factory=Counter)
    preemptions: list[Preemption] = field(default_factory=list)
    sequences: dict[Key, SequenceAccount] = field(default_factory=dict)
    peak_used_blocks: int = 0
    peak_step: int = 0
    num_blocks: int = 0
    peak_running: int = 0
    peak_waiting: int = 0

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens that preemption made the engine compute again."""
        return sum(preemption.num_recomputed_tokens or 0 for preemption in self.preemptions)

    def histogram(self) -> list[tuple[int, int, int]]:
        """Steps by their tokens, in powers of two: lowest, highest, number of steps; empty ones left out."""
        bins = Counter[int]()
        for num_tokens, num_steps in self.tokens_per_step.items():
            bins[max(0, math.ceil(math.log2(max(num_tokens, 1))))] += num_steps
        return [((1 << power) // 2 + 1, 1 << power, bins[power]) for power in sorted(bins)]


def name_of(key: Key) -> str:
    """``request`` or, of several samples, ``request[child]``."""
    return f"{key[0]}[{key[1]}]" if key[1] else key[0]


def account(trace: Trace) -> TraceAccount:
    """Go through the steps once."""
    total = TraceAccount()
    open_preemptions: dict[Key, Preemption] = {}
    for step in trace.steps:
        _preempt(total, step, open_preemptions)
        _run(total, step, open_preemptions)
        for request_id, child_index, reason in step.finished:
            total.finish_reasons[reason] += 1
            if (sequence := total.sequences.get((request_id, child_index))) is not None:
                sequence.finish_reason = reason
        _measure(total, step)
    if trace.steps:
        total.duration = trace.steps[-1].time - trace.steps[0].start
    return total


def _preempt(total: TraceAccount, step: TracedStep, open_preemptions: dict[Key, Preemption]) -> None:
    if not step.preempted:
        return
    admitted = tuple(_admitted(total, step, open_preemptions))
    for key in step.preempted:
        sequence = total.sequences.setdefault(key, SequenceAccount(step.number, 0))
        sequence.num_preemptions += 1
        preemption = Preemption(
            step.number, key, sequence.num_computed_tokens, sequence.num_output_tokens, admitted
        )
        total.preemptions.append(preemption)
        open_preemptions[key] = preemption


def _admitted(
    total: TraceAccount, step: TracedStep, open_preemptions: dict[Key, Preemption]
) -> Iterable[Key]:
    """Who runs in `step` and did not before: new sequences and those that come back."""
    return (
        item.key for item in step.scheduled if item.key not in total.sequences or item.key in open_preemptions
    )


def _run(total: TraceAccount, step: TracedStep, open_preemptions: dict[Key, Preemption]) -> None:
    for item in step.scheduled:
        sequence = total.sequences.get(item.key)
        if sequence is None:
            sequence = total.sequences[item.key] = SequenceAccount(step.number, item.start)
        elif (preemption := open_preemptions.pop(item.key, None)) is not None:
            preemption.num_recomputed_tokens = max(0, preemption.num_computed_tokens - item.start)
        sequence.num_computed_tokens = item.start + item.num_tokens
        sequence.num_scheduled_tokens += item.num_tokens
        sequence.num_output_tokens += item.num_samples > 0
        sequence.last_step = step.number
        # The step that samples the first tokens of several samples makes children of the one sequence.
        for child in range(1, item.num_samples):
            total.sequences[item.request_id, child] = SequenceAccount(
                step.number, 0, sequence.num_computed_tokens, 1, last_step=step.number
            )
        total.num_output_tokens += item.num_samples


def _measure(total: TraceAccount, step: TracedStep) -> None:
    total.num_steps += 1
    total.num_scheduled_tokens += step.num_tokens
    total.tokens_per_step[step.num_tokens] += 1
    total.num_block_copies += len(step.block_copies)
    total.seconds.update(step.timings)
    total.num_blocks = step.num_used_blocks + step.num_cached_blocks + step.num_free_blocks
    total.peak_running = max(total.peak_running, step.num_running)
    total.peak_waiting = max(total.peak_waiting, step.num_waiting)
    if step.num_used_blocks > total.peak_used_blocks:
        total.peak_used_blocks, total.peak_step = step.num_used_blocks, step.number
