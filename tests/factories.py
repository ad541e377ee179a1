"""Small sequences, a small scheduler, and a model without tensors that notices every wrong cache entry."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from tessera_cli.engine.sequence import SampleError, Sequence

EOS_TOKEN_ID = 0
VOCAB_SIZE = 23


def make_scheduler(
    *,
    num_blocks: int = 9,
    block_size: int = 4,
    max_model_len: int = 32,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 16,
    enable_chunked_prefill: bool = True,
) -> Scheduler:
    """A scheduler over a pool that is small enough to run short."""
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
    )
    return Scheduler(config, eos_token_ids=(EOS_TOKEN_ID,))


def make_sequences(
    prompt_lens: SequenceOf[int], *, max_tokens: int = 8, ignore_eos: bool = True, prefix: str = "r"
) -> list[Sequence]:
    """One sequence per prompt length, with ids r0, r1, ... and prompts that all differ."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
    return [
        Sequence(f"{prefix}{index}", [1 + (5 * index + position) % 20 for position in range(length)], params)
        for index, length in enumerate(prompt_lens)
    ]


def next_token(token_ids: Iterable[int]) -> int:
    """The token after `token_ids`: it depends on each of them and on their order."""
    state = 17
    for token_id in token_ids:
        state = (state * 31 + token_id + 1) % 1_000_003
    return state % VOCAB_SIZE


def expected_tokens(sequence: Sequence, *, max_model_len: int) -> list[int]:
    """Prompt and output of `sequence` when it runs alone, from the definition of the model."""
    token_ids = list(sequence.token_ids[: sequence.num_prompt_tokens])
    params = sequence.params
    while True:
        token_ids.append(next_token(token_ids))
        is_eos = token_ids[-1] == EOS_TOKEN_ID and not params.ignore_eos
        if is_eos or token_ids[-1] in params.stop_token_ids:
            return token_ids
        if (
            len(token_ids) == max_model_len
            or len(token_ids) - sequence.num_prompt_tokens == params.max_tokens
        ):
            return token_ids


class FakeModel:
    """Writes token ids where a model writes keys and values, and samples from what it reads back.

    A slot that was overwritten by a neighbour, handed out twice or never computed changes the output.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._slots: dict[tuple[int, int], int] = {}

    def run(self, output: SchedulerOutput) -> dict[str, int | SampleError]:
        """The sampled token of every sequence in `output` that samples one."""
        self._write(output, offset=0)
        return {
            item.sequence.request_id: next_token(self._read(item))
            for item in output.scheduled
            if item.samples
        }

    def fail(self, output: SchedulerOutput) -> None:
        """A step that breaks after having written nonsense to every slot it was given."""
        self._write(output, offset=1000)

    def _write(self, output: SchedulerOutput, offset: int) -> None:
        for item in output.scheduled:
            for position in range(item.start, item.start + item.num_scheduled_tokens):
                token_id = item.sequence.token_ids[position]
                self._slots[self._slot(item.sequence, position)] = token_id + offset

    def _read(self, item: ScheduledSequence) -> list[int]:
        sequence = item.sequence
        return [self._slots[self._slot(sequence, position)] for position in range(sequence.num_tokens)]

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
    assert len(output.scheduled) == scheduler.num_running <= config.max_num_seqs
    assert sum(item.num_scheduled_tokens for item in output.scheduled) == output.num_scheduled_tokens
    assert output.num_scheduled_tokens <= config.max_num_batched_tokens
    for item in output.scheduled:
        end = item.start + item.num_scheduled_tokens
        assert item.num_scheduled_tokens >= 1
        assert item.start == item.sequence.num_computed_tokens
        assert item.samples == (end == item.sequence.num_tokens)
        assert len(item.sequence.block_table) == config.blocks_for(item.sequence.num_tokens)
        assert config.enable_chunked_prefill or item.samples
        assert item.sequence not in output.preempted
