"""Whatever is added, forked, aborted, preempted or rolled back: no block is lost, nobody's output changes."""

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason, SampleError, Sequence
from tests.factories import FakeModel, check_output, expected_tokens, make_scheduler

BLOCK_SIZES = st.sampled_from([4, 3, 2, 1])
# Few prompts that begin alike, so that they meet in the cache.
PROMPTS = st.builds(
    lambda length, tail: [3] * (length - len(tail[:length])) + tail[:length],
    st.integers(1, 15),
    st.lists(st.sampled_from([3, 4]), max_size=3),
)


class Books(RuleBasedStateMachine):
    """One scheduler whose pool holds 1 to 2 of the longest sequences, driven by chance."""

    @initialize(
        block_size=BLOCK_SIZES,
        max_model_len=st.sampled_from([8, 12, 16]),
        extra=st.integers(0, 4),
        max_num_seqs=st.sampled_from([8, 3, 1]),
        budget=st.sampled_from([30, 5, 2, 1, None]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caches=st.booleans(),
        num_kept=st.sampled_from([None, 0, 2]),
    )
    def start(
        self,
        block_size: int,
        max_model_len: int,
        extra: int,
        max_num_seqs: int,
        budget: int | None,
        policy: str,
        caches: bool,
        num_kept: int | None,
    ) -> None:
        self.scheduler = make_scheduler(
            num_blocks=1 + -(-max_model_len // block_size) + extra,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget or max_model_len,
            enable_chunked_prefill=budget is not None,
            scheduling_policy=policy,
            enable_prefix_caching=caches,
            num_kept_blocks=num_kept,
        )
        self.model = FakeModel(block_size)
        self.sequences: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.num_added = 0
        self.output: Any = None

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 11),
        ignore_eos=st.booleans(),
        stops=st.lists(st.integers(0, 22), max_size=1),
        n=st.sampled_from([3, 1, 2, 1]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "a"]),
        min_tokens=st.sampled_from([0, 0, 2]),
        reads_cache=st.sampled_from([True, True, True, False]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        ignore_eos: bool,
        stops: list[int],
        n: int,
        priority: int,
        salt: str | None,
        min_tokens: int,
        reads_cache: bool,
    ) -> None:
        config = self.scheduler.config
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=tuple(stops),
            n=min(n, config.max_num_slots),
            min_tokens=min(min_tokens, max_tokens),
            prompt_logprobs=None if reads_cache else 0,
        )
        sequence = Sequence(
            f"r{self.num_added}",
            prompt[: config.max_model_len - 1],
            params,
            priority=priority if config.scheduling_policy == "priority" else 0,
            cache_salt=salt,
        )
        self.num_added += 1
        self.scheduler.add(sequence)
        self.sequences.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        live = self.scheduler.queues.requests.get(sequence.request_id, [])
        is_live = any(not one.aborted for one in live)
        assert self.scheduler.abort(sequence.request_id) == is_live
        assert not self.scheduler.abort(sequence.request_id)

    @precondition(lambda self: self.output is None and self.scheduler.num_running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.scheduler.queues.running))
        if sequence.num_pending_forks == 0:
            ended = self.scheduler.finish(sequence.request_id, sequence.child_index, FinishReason.ABORT)
            assert ended is sequence

    @precondition(lambda self: self.scheduler.block_pool.num_cached_blocks > 2)
    @rule()
    def reset_prefix_cache(self) -> None:
        self.model.weights += 1
        self.scheduler.reset_prefix_cache()

    @precondition(lambda self: self.output is None)
    @rule(fails=st.sampled_from([False, False, True]))
    def schedule(self, fails: bool) -> None:
        self.output = self.scheduler.schedule()
        check_output(self.scheduler, self.output)
        for item in self.output.scheduled:
            if item.start == item.sequence.num_cached_tokens:  # it has just been admitted
                assert self.model.oldest_weights(item.sequence) == self.model.weights
        if fails:
            self.model.fail(self.output)
        self.tokens = None if fails else self.model.run(self.output)

    @precondition(lambda self: self.output is not None)
    @rule(fails_to_sample=st.sampled_from([False, False, True]))
    def end_step(self, fails_to_sample: bool) -> None:
        if self.tokens is None:
            self.scheduler.rollback()
        else:
            if fails_to_sample and self.tokens:
                first = next(iter(self.tokens))
                self.tokens[first] = [SampleError("not finite")] * len(self.tokens[first])
            self.finished += self.scheduler.commit(self.output, self.tokens)
            known = {id(one) for one in self.sequences}
            for one in [*self.scheduler.queues.live(), *self.finished]:
                if id(one) not in known:  # a child
                    known.add(id(one))
                    self.sequences.append(one)
        self.output = None

    @precondition(lambda self: self.sequences)
    @rule(count=st.integers(1, 8), fails_to_sample=st.booleans())
    def whole_steps(self, count: int, fails_to_sample: bool) -> None:
        """Without these a walk of chance alone hardly gets anywhere."""
        for index in range(count):
            if self.output is None:
                self.schedule(False)
            self.end_step(fails_to_sample and index == count - 1)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_invariants()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.output is not None:
            self.end_step(False)
        budget = 40 * len(self.sequences) + 40
        while self.scheduler.has_unfinished():
            self.schedule(False)
            self.end_step(False)
            self.scheduler.check_invariants()
            budget -= 1
            assert budget > 0, "the queues never empty"
        pool = self.scheduler.block_pool
        assert pool.num_free_blocks == self.scheduler.config.num_usable_blocks
        for sequence in self.sequences:
            expected = expected_tokens(sequence, max_model_len=self.scheduler.config.max_model_len)
            if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert sequence.token_ids == expected
                assert sum(one is sequence for one in self.finished) == 1
            else:
                assert sequence.token_ids == expected[: sequence.num_tokens]


SETTINGS = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
Books.TestCase.settings = SETTINGS
TestBooks = Books.TestCase


def test_the_walks_are_hard() -> None:
    """The property above means little if the pools never run short and nothing is ever shared."""
    seen: Counter[str] = Counter()

    class Counted(Books):
        def teardown(self) -> None:
            super().teardown()
            if hasattr(self, "scheduler"):
                seen["preemptions"] += self.scheduler.num_preemptions
                seen["forks"] += self.scheduler.num_forks
                seen["copies"] += self.scheduler.num_block_copies
                seen["hits"] += self.scheduler.prefix_cache.num_hits
                seen.update(str(sequence.finish_reason) for sequence in self.sequences)

    run_state_machine_as_test(Counted, settings=settings(SETTINGS, max_examples=40))
    shared = {"preemptions", "forks", "copies", "hits"}
    assert all(seen[name] >= 5 for name in shared | {"stop", "length", "abort", "error"}), seen
