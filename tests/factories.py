"""Small sequences, a small scheduler, and a model without tensors that notices every wrong cache entry."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from tessera_cli.engine.sequence import SampleError, Sequence, SequenceKey

EOS_TOKEN_ID = 0
VOCAB_SIZE = 23

Tokens = dict[SequenceKey, list[int | SampleError]]


def make_scheduler(**sizes: Any) -> Scheduler:
    """A scheduler over a pool that is small enough to run short: 8 blocks of 4 tokens."""
    defaults: dict[str, Any] = {
        "num_blocks": 9,
        "block_size": 4,
        "max_model_len": 32,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
    }
    return Scheduler(EngineConfig(**defaults | sizes), eos_token_ids=(EOS_TOKEN_ID,))


def make_sequences(
    prompt_lens: SequenceOf[int],
    *,
    max_tokens: int = 8,
    ignore_eos: bool = True,
    n: int = 1,
    priority: int = 0,
    prefix: str = "r",
) -> list[Sequence]:
    """One sequence per prompt length, with ids r0, r1, ... and prompts that all differ."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos, n=n)
    return [
        Sequence(
            f"{prefix}{index}",
            [1 + (5 * index + position) % 20 for position in range(length)],
            params,
            priority=priority,
        )
        for index, length in enumerate(prompt_lens)
    ]


def next_token(token_ids: Iterable[int], child_index: int = 0) -> int:
    """The token after `token_ids`: it depends on each of them and on their order, and on the child."""
    state = 17 + 7 * child_index
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return state % VOCAB_SIZE


def expected_tokens(sequence: Sequence, *, max_model_len: int) -> list[int]:
    """Prompt and output of `sequence` when it runs alone, from the definition of the model."""
    token_ids = list(sequence.token_ids[: sequence.num_prompt_tokens])
    params = sequence.params
    while True:
        token_ids.append(next_token(token_ids, sequence.child_index))
        num_output_tokens = len(token_ids) - sequence.num_prompt_tokens
        is_eos = token_ids[-1] == EOS_TOKEN_ID and not params.ignore_eos
        if num_output_tokens >= params.min_tokens and (is_eos or token_ids[-1] in params.stop_token_ids):
            return token_ids
        if len(token_ids) == max_model_len or num_output_tokens == params.max_tokens:
            return token_ids


class FakeModel:
    """Writes token ids where a model writes keys and values, and samples from what it reads back.

    A slot that was overwritten by a neighbour, handed out twice, not copied or never computed changes the
    output. `weights` is the number of its present weights, which each slot remembers.
    """

    def __init__(self, block_size: int) -> None:
        self.weights = 0
        self._block_size = block_size
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}

    def run(self, output: SchedulerOutput) -> Tokens:
        """The sampled tokens of every sequence in `output` that samples."""
        self._copy(output)
        self._write(output, offset=0)
        return {
            item.sequence.key: [
                next_token(self._read(item), item.sequence.child_index + index)
                for index in range(item.num_samples)
            ]
            for item in output.scheduled
            if item.num_samples
        }

    def fail(self, output: SchedulerOutput) -> None:
        """A step that breaks before it has copied, having written nonsense to every slot it was given."""
        self._write(output, offset=1000)

    def oldest_weights(self, sequence: Sequence) -> int:
        """The oldest weights that any computed token of `sequence` was computed with."""
        slots = (self._slot(sequence, position) for position in range(sequence.num_computed_tokens))
        return min((self._slots[slot][1] for slot in slots), default=self.weights)

    def _copy(self, output: SchedulerOutput) -> None:
        targets = [copy.target for copy in output.block_copies]
        assert len(set(targets)) == len(targets)
        for source, target in output.block_copies:
            for offset in range(self._block_size):
                if (source, offset) in self._slots:
                    self._slots[target, offset] = self._slots[source, offset]

    def _write(self, output: SchedulerOutput, offset: int) -> None:
        for item in output.scheduled:
            for position in range(item.start, item.start + item.num_scheduled_tokens):
                token_id = item.sequence.token_ids[position]
                self._slots[self._slot(item.sequence, position)] = (token_id + offset, self.weights)

    def _read(self, item: ScheduledSequence) -> list[int]:
        sequence = item.sequence
        return [self._slots[self._slot(sequence, position)][0] for position in range(sequence.num_tokens)]

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // self._block_size], position % self._block_size


def run_step(scheduler: Scheduler, model: FakeModel) -> tuple[SchedulerOutput, list[Sequence]]:
    """One committed step with the books checked before and after it."""
    output = scheduler.schedule()
    check_output(scheduler, output)
    finished = scheduler.commit(output, model.run(output))
    scheduler.check_invariants()
    return output, finished


def run_all(scheduler: Scheduler, model: FakeModel, *, max_steps: int = 2000) -> list[Sequence]:
    """Step until nothing is left; the finished, in the order in which they finish."""
    finished: list[Sequence] = []
    for _ in range(max_steps):
        if not scheduler.has_unfinished():
            return finished
        finished += run_step(scheduler, model)[1]
    raise AssertionError(
        f"{scheduler.num_running + scheduler.num_waiting} unfinished after {max_steps} steps"
    )


def check_output(scheduler: Scheduler, output: SchedulerOutput) -> None:
    """Check what every step promises: all running sequences, each with tokens and with blocks for them."""
    config = scheduler.config
    scheduler.check_invariants()
    assert [item.sequence for item in output.scheduled] == scheduler.queues.running
    assert sum(item.num_scheduled_tokens for item in output.scheduled) == output.num_scheduled_tokens
    assert output.num_scheduled_tokens <= config.max_num_batched_tokens
    written: set[int] = set()
    for item in output.scheduled:
        sequence, end = item.sequence, item.start + item.num_scheduled_tokens
        assert item.num_scheduled_tokens >= 1
        assert item.start == sequence.num_computed_tokens
        assert item.samples == (end == sequence.num_tokens)
        assert item.num_samples in (0, 1 + sequence.num_pending_forks)
        assert len(sequence.block_table) == config.blocks_for(sequence.num_tokens)
        assert config.enable_chunked_prefill or item.samples
        assert sequence not in output.preempted
        blocks = sequence.block_table[item.start // config.block_size : -(-end // config.block_size)]
        assert all(scheduler.block_pool.ref_count(block) == 1 for block in blocks), "writes a shared block"
        assert written.isdisjoint(blocks)
        written.update(blocks)


def start_sequences(scheduler: Scheduler, prompt_lens: list[int], *, max_tokens: int = 8) -> list[Sequence]:
    """New sequences that wait in `scheduler`."""
    sequences = make_sequences(prompt_lens, max_tokens=max_tokens)
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def scheduled_lengths(output: SchedulerOutput) -> dict[str, int]:
    """Tokens that a step schedules of each request."""
    return {item.sequence.request_id: item.num_scheduled_tokens for item in output.scheduled}
