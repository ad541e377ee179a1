"""Whatever is added, aborted, preempted or rolled back: no block is lost, and nobody's output changes."""

import random

import pytest

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.sequence import FinishReason, Sequence
from tests.factories import FakeModel, check_output, expected_tokens, make_scheduler


class Walk:
    """A seeded random walk over one scheduler, whose pool holds one to two of the longest sequences."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.block_size = self.random.choice([1, 2, 4])
        max_model_len = self.random.choice([9, 16, 23])
        num_needed = -(-max_model_len // self.block_size)
        is_chunked = self.random.random() < 0.7
        self.scheduler: Scheduler = make_scheduler(
            num_blocks=1 + num_needed + self.random.randrange(num_needed + 1),
            block_size=self.block_size,
            max_model_len=max_model_len,
            max_num_seqs=self.random.choice([1, 3, 8]),
            max_num_batched_tokens=self.random.choice([1, 2, 5, 30]) if is_chunked else max_model_len,
            enable_chunked_prefill=is_chunked,
        )
        self.model = FakeModel(self.block_size)
        self.sequences: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.num_rollbacks = 0

    def add(self) -> None:
        max_model_len = self.scheduler.config.max_model_len
        params = SamplingParams(
            max_tokens=self.random.randrange(1, 12),
            ignore_eos=self.random.random() < 0.5,
            stop_token_ids=tuple(self.random.sample(range(23), self.random.randrange(2))),
        )
        prompt = [self.random.randrange(23) for _ in range(self.random.randrange(1, max_model_len))]
        sequence = Sequence(f"r{len(self.sequences)}", prompt, params)
        self.sequences.append(sequence)
        self.scheduler.add(sequence)

    def abort(self) -> None:
        if self.sequences:
            sequence = self.random.choice(self.sequences)
            was_live = sequence.finish_reason is None and not sequence.aborted
            assert self.scheduler.abort(sequence.request_id) == was_live

    def step(self, *, quietly: bool = False) -> None:
        output = self.scheduler.schedule()
        check_output(self.scheduler, output)
        if not quietly:
            for action in (self.add, self.abort):
                if self.random.random() < 0.15:
                    action()
        if not quietly and self.random.random() < 0.2:
            self.model.fail(output)
            self.scheduler.rollback()
            self.num_rollbacks += 1
        else:
            self.finished += self.scheduler.commit(output, self.model.run(output))
        self.scheduler.check_invariants()

    def run(self, num_actions: int) -> None:
        for _ in range(num_actions):
            (action,) = self.random.choices([self.add, self.abort, self.step], weights=[3, 1, 12])
            action()
            self.scheduler.check_invariants()
        budget = 40 * len(self.sequences) + 40
        while self.scheduler.has_unfinished():
            self.step(quietly=True)
            budget -= 1
            assert budget > 0, "the queues never empty"


@pytest.mark.parametrize("seed", range(60))
def test_a_random_walk_ends_with_all_blocks_free_and_uncontended_outputs(seed: int) -> None:
    walk = Walk(seed)
    walk.run(150)
    scheduler = walk.scheduler
    assert scheduler.block_pool.num_free_blocks == scheduler.config.num_usable_blocks
    for sequence in walk.sequences:
        expected = expected_tokens(sequence, max_model_len=scheduler.config.max_model_len)
        if sequence.finish_reason is FinishReason.ABORT:
            assert sequence.token_ids == expected[: sequence.num_tokens]
        else:
            assert sequence.token_ids == expected
            assert walk.finished.count(sequence) == 1


def test_the_walks_are_hard() -> None:
    """The property above means little if the pools never run short."""
    walks = [Walk(seed) for seed in range(60)]
    for walk in walks:
        walk.run(150)
    assert sum(walk.scheduler.num_preemptions > 3 for walk in walks) >= 10
    assert all(walk.num_rollbacks for walk in walks)
    reasons = {sequence.finish_reason for walk in walks for sequence in walk.sequences}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
