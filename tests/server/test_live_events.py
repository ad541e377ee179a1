"""The events of the live view: put together, they are the pool itself; its rates are those of the engine."""

import asyncio
import json
import random

import pytest

from tessera_cli.engine.snapshot import EngineSnapshot
from tessera_cli.serving.api.live_events import CACHED, FREE, MAX_SEQUENCES, LiveEncoder, LiveEvent
from tessera_cli.serving.async_llm import Status
from tests.server.toy_server import ToyLLM


def snapshot_of(llm: ToyLLM) -> EngineSnapshot:
    return asyncio.run(llm.snapshot())


class Reader:
    """What the page does with the events: the owner and the references of each block."""

    def __init__(self) -> None:
        self.tiles: dict[int, tuple[int, int]] = {}

    def take(self, event: LiveEvent) -> None:
        told = [
            (block, (owner, references))
            for first, count, owner, references in event.tiles
            for block in range(first, first + count)
        ]
        assert len({block for block, _ in told}) == len(told), "a block is told twice"
        assert all(self.tiles.get(block, (FREE, 0)) != tile for block, tile in told), "nothing has changed"
        self.tiles |= dict(told)


def check_against_the_pool(reader: Reader, event: LiveEvent, llm: ToyLLM) -> None:
    pool = llm.scheduler.block_pool
    cached = set(pool.cached_blocks())
    tables = {(one.request_id[-12:], one.child_index): one.block_table for one in llm.scheduler.queues.live()}
    holders = {row.owner: tables[row.request, row.sample] for row in event.sequences}
    assert 0 not in reader.tiles, "the null block is told"
    for block in range(1, pool.num_blocks):
        owner, references = reader.tiles.get(block, (FREE, 0))
        assert references == pool.ref_count(block)
        if references:
            assert block in holders[owner]
        else:
            assert owner == (CACHED if block in cached else FREE)


def test_the_events_together_are_the_pool() -> None:
    rng = random.Random(5)
    llm, encoder, reader = ToyLLM(num_blocks=65), LiveEncoder(), Reader()
    seen = set()
    for _ in range(150):
        if rng.random() < 0.4 and len(llm.scheduler.queues.requests) < 12:
            llm.add(num_tokens=rng.randint(1, 20), max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 3]))
        if llm.scheduler.has_unfinished():
            llm.step()
        event = encoder.encode(snapshot_of(llm))
        assert len(event.sequences) < MAX_SEQUENCES, "the check needs them all"
        reader.take(event)
        check_against_the_pool(reader, event, llm)
        seen |= {"shared" for _, _, _, references in event.tiles if references > 1}
        seen |= {"cached" for _, _, owner, _ in event.tiles if owner == CACHED}
        seen |= {row.status for row in event.sequences}
    assert seen == {"shared", "cached", "running", "preempted", "waiting"}, "the run is too easy"


def test_nothing_new_is_told_in_few_numbers() -> None:
    llm, encoder = ToyLLM(num_blocks=20_000), LiveEncoder()
    llm.add(num_tokens=40)
    llm.step()
    assert encoder.encode(snapshot_of(llm)).tiles
    assert encoder.encode(snapshot_of(llm)).tiles == []


def test_alike_blocks_in_a_row_are_one_run() -> None:
    llm = ToyLLM()
    llm.add(num_tokens=20)
    llm.step()
    assert LiveEncoder().encode(snapshot_of(llm)).tiles == [(1, 8, 1, 1)]


def test_a_shared_block_is_the_best_ranked_holders() -> None:
    llm = ToyLLM()
    llm.add(num_tokens=4, n=3)
    llm.step()
    event = LiveEncoder().encode(snapshot_of(llm))
    assert event.tiles == [(1, 4, event.sequences[0].owner, 3)]
    assert [row.sample for row in event.sequences] == [0, 1, 2]


def test_a_number_is_never_given_to_another() -> None:
    llm, encoder = ToyLLM(), LiveEncoder()
    owners = []
    for _ in range(3):
        llm.add(max_tokens=1, request_id="again")
        owners += [row.owner for row in encoder.encode(snapshot_of(llm)).sequences]
        llm.step()
        encoder.encode(snapshot_of(llm))
    assert len(set(owners)) == 3


def test_a_number_stays_with_its_sequence_when_it_is_preempted() -> None:
    llm, encoder = ToyLLM(num_blocks=33), LiveEncoder()
    for _ in range(6):
        llm.add(num_tokens=20, max_tokens=60)
    owners: dict[str, set[int]] = {}
    while llm.scheduler.num_preemptions < 3:
        llm.step()
        for row in encoder.encode(snapshot_of(llm)).sequences:
            owners.setdefault(row.request, set()).add(row.owner)
    assert all(len(numbers) == 1 for numbers in owners.values())


def test_who_is_not_listed_is_counted() -> None:
    llm = ToyLLM(max_num_seqs=4)
    for _ in range(MAX_SEQUENCES + 10):
        llm.add()
    llm.step()
    event = LiveEncoder().encode(snapshot_of(llm))
    assert len(event.sequences) == MAX_SEQUENCES
    assert (event.num_running, event.num_waiting, event.num_preempted) == (4, MAX_SEQUENCES + 6, 0)


def test_the_rates_are_those_since_the_event_before(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, encoder = ToyLLM(), LiveEncoder()
    monkeypatch.setattr("tessera_cli.engine.snapshot.time.monotonic", lambda: 10 + llm._now)
    first = encoder.encode(snapshot_of(llm))
    assert (first.tokens_per_second, first.ttft, first.tpot) == (None, None, None)
    llm.add(max_tokens=30)
    llm.add(max_tokens=30)
    for _ in range(4):
        llm.step()
    event = encoder.encode(snapshot_of(llm))
    assert event.tokens_per_second == pytest.approx(8 / 0.2)
    assert event.ttft == pytest.approx(0.12)
    assert event.tpot == pytest.approx(0.05)
    llm.step()
    assert encoder.encode(snapshot_of(llm)).ttft is None, "nobody got a first token"


def test_tokens_long_ago_count_for_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, encoder = ToyLLM(), LiveEncoder()
    monkeypatch.setattr("tessera_cli.engine.snapshot.time.monotonic", lambda: 10 + llm._now)
    llm.add(max_tokens=30)
    rates = []
    for seconds in (0.0, 0.45, 0.95, 0.95, 0.95):
        llm.step()
        llm._now += seconds
        rates.append(encoder.encode(snapshot_of(llm)).tokens_per_second)
    assert rates == [None, *map(pytest.approx, (1 / 0.5, 2 / 1.5, 2 / 2.0, 2 / 2.0))]


def test_an_event_goes_through_json() -> None:
    from tessera_cli.serving.api import sse

    llm = ToyLLM()
    llm.add(n=2)
    llm.step()
    head, _, data = sse.event(LiveEncoder().encode(snapshot_of(llm))).partition(b": ")
    assert head == b"data"
    assert json.loads(data)["tiles"] == [[1, 4, 1, 2]]


@pytest.mark.parametrize("status", [Status.DRAINING, Status.DEAD])
def test_the_events_end_with_the_engine(status: Status) -> None:
    from tessera_cli.serving.api.live_view import _events

    async def read(llm: ToyLLM) -> int:
        number = 0
        async for _ in _events(llm):  # type: ignore[arg-type]
            number += 1
            llm.status = status
        return number

    assert asyncio.run(read(ToyLLM())) == 1
