"""A trace says what happened: written step by step, read back whole, cut short by a crash, broken."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tessera_cli.engine.chrome_trace import chrome_trace
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.sequence import Sequence
from tessera_cli.engine.stats import EngineStats
from tessera_cli.engine.trace import TraceWriter
from tessera_cli.engine.trace_account import account
from tessera_cli.engine.trace_reader import Trace, read_trace
from tessera_cli.errors import DataError, UsageError

SECRET = 987654
TIMINGS = {"schedule": 0.001, "run": 0.02, "commit": 0.002}


def stats_of(scheduler: Scheduler) -> EngineStats:
    usable = scheduler.config.num_usable_blocks
    return EngineStats(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_preemptions=scheduler.num_preemptions,
        num_finished=0,
        num_failed=0,
        num_blocks=usable,
        num_used_blocks=usable - scheduler.block_pool.num_free_blocks,
        num_cached_blocks=scheduler.block_pool.num_cached_blocks,
        block_size=scheduler.config.block_size,
        prompt_tokens=0,
        generation_tokens=0,
        num_steps=0,
    )


def write(
    path: Path, *, num_blocks: int = 40, n: int = 1, num_requests: int = 3, policy: str = "fcfs"
) -> int:
    """Run requests of 6 tokens in and 9 out through a scheduler with a trace; the number of steps."""
    config = EngineConfig(
        num_blocks=num_blocks, max_model_len=16, block_size=4, max_num_seqs=8, scheduling_policy=policy
    )
    scheduler = Scheduler(config, eos_token_ids=())
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, n=n)
    for index in range(num_requests):
        scheduler.add(Sequence(f"r{index}", [SECRET + index] * 6, params))
    num_steps = 0
    with TraceWriter.open(path, config) as writer:
        while scheduler.has_unfinished():
            if num_steps == 4 and policy == "priority":
                scheduler.add(Sequence("urgent", [SECRET - 1] * 6, params, priority=-1))
            output = scheduler.schedule()
            tokens = {i.sequence.key: [SECRET] * i.num_samples for i in output.scheduled if i.num_samples}
            finished = scheduler.commit(output, tokens)
            num_steps += 1
            writer.on_step(output, tokens, finished, TIMINGS, stats_of(scheduler))
    return num_steps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.trace"


def test_a_trace_read_back_has_every_step_and_token(path: Path):
    num_steps = write(path)
    trace = read_trace(path)
    assert (len(trace.steps), trace.cut_line) == (num_steps, None)
    total = account(trace)
    # The last token of an answer is sampled and never computed.
    assert (total.num_output_tokens, total.num_scheduled_tokens) == (3 * 9, 3 * (6 + 8))
    assert total.finish_reasons == {"length": 3}
    assert sum(count for *_, count in total.histogram()) == num_steps
    assert total.seconds["run"] == pytest.approx(num_steps * TIMINGS["run"])
    assert total.num_blocks == 39
    assert total.peak_used_blocks == max(step.num_used_blocks for step in trace.steps) > 0
    assert trace.config["block_size"] == 4


def test_neither_text_nor_token_ids_are_in_a_trace(path: Path):
    write(path)
    assert str(SECRET) not in path.read_text()


def test_a_preemption_is_told_with_who_why_and_its_price(path: Path):
    write(path, num_blocks=9)
    total = account(read_trace(path))
    assert total.preemptions
    for preemption in total.preemptions:
        assert preemption.reason == "KV blocks ran short for those ahead of it"
        assert 0 <= preemption.num_recomputed_tokens <= preemption.num_computed_tokens > 0
    # What is computed beyond each answer's own tokens is what preemption cost.
    assert total.num_scheduled_tokens == 3 * (6 + 8) + total.num_recomputed_tokens


def test_who_is_let_in_by_a_preemption_is_named(path: Path):
    write(path, num_blocks=8, num_requests=2, policy="priority")
    reasons = [preemption.reason for preemption in account(read_trace(path)).preemptions]
    assert "made room for urgent" in reasons


def test_the_samples_of_a_request_are_sequences_of_their_own(path: Path):
    write(path, n=3, num_requests=1)
    total = account(read_trace(path))
    assert sorted(total.sequences) == [("r0", 0), ("r0", 1), ("r0", 2)]
    assert {sequence.num_output_tokens for sequence in total.sequences.values()} == {9}
    assert total.num_block_copies == 2


def test_a_line_is_in_the_file_as_soon_as_its_step_is_done(path: Path):
    config = EngineConfig(num_blocks=9, max_model_len=16, block_size=4)
    scheduler = Scheduler(config, eos_token_ids=())
    scheduler.add(Sequence("r", [1, 2], SamplingParams(max_tokens=4)))
    with TraceWriter.open(path, config) as writer:
        output = scheduler.schedule()
        tokens = {("r", 0): [7]}
        writer.on_step(output, tokens, scheduler.commit(output, tokens), TIMINGS, stats_of(scheduler))
        assert len(read_trace(path).steps) == 1


@pytest.mark.parametrize("num_lost", [1, 30])
def test_a_trace_cut_short_is_read_up_to_its_last_whole_line(path: Path, num_lost: int):
    num_steps = write(path)
    path.write_bytes(path.read_bytes()[:-num_lost])
    trace = read_trace(path)
    assert (len(trace.steps), trace.cut_line) == (num_steps - 1, num_steps + 1)


@pytest.mark.parametrize(
    ("line", "text", "told"),
    [
        (1, "{}", "1: no trace"),
        (1, '{"format": "tessera-trace", "version": 9}', "1: trace version 9"),
        (3, "not json", "3: not JSON"),
        (3, '{"time": NaN}', "3: not JSON: NaN is no number"),
        (3, "[" * 100_000, "3: not JSON"),
        (3, "{}", "3: not a step of a trace (no 'pool')"),
        (3, "[]", "3: not a step of a trace"),
        (3, None, "3: step 3 stands where step 2 belongs"),
    ],
)
def test_a_broken_line_is_named(path: Path, line: int, text: str | None, told: str):
    write(path)
    lines = path.read_text().splitlines()
    lines[line - 1 : line] = [] if text is None else [text]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError) as raised:
        read_trace(path)
    assert told in raised.value.message


def test_what_is_no_file_is_refused(tmp_path: Path):
    (tmp_path / "empty").touch()
    for name in ("missing", "empty"):
        with pytest.raises(DataError):
            read_trace(tmp_path / name)
    with pytest.raises(UsageError, match="cannot be written"):
        TraceWriter.open(tmp_path / "no" / "where", EngineConfig(num_blocks=9, max_model_len=16))


def test_trace_events_cover_each_step_and_each_sequence(path: Path):
    num_steps = write(path, num_blocks=9)
    trace = read_trace(path)
    events = json.loads(json.dumps(chrome_trace(trace)))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    engine = [event for event in slices if event["pid"] == 1]
    assert len(engine) == 3 * num_steps
    for before, after in pairwise(engine):
        if before["args"]["step"] == after["args"]["step"]:
            assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=0.2)
    assert len(slices) - len(engine) == sum(len(step.scheduled) for step in trace.steps)
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {"steps", "r0", "r1", "r2"}
    assert sum(event["name"] == "preempted" for event in events) == len(account(trace).preemptions)


def test_an_empty_trace_has_an_account(path: Path):
    with TraceWriter.open(path, EngineConfig(num_blocks=9, max_model_len=16)):
        pass
    assert json.loads(path.read_text())["config"]["num_blocks"] == 9
    total = account(Trace({}, {}, (), None))
    assert (total.num_steps, total.histogram(), total.duration) == (0, [], 0.0)
