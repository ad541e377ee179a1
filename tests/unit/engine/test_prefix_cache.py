"""What is found is the text itself: same tokens, same predecessor, same salt, computed to the end."""

import pytest

from tessera_cli.engine import prefix_cache
from tessera_cli.engine.prefix_cache import PrefixCache, block_digest, root_digest
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import Sequence

BLOCK_SIZE = 16


def make_sequence(token_ids: list[int], *, salt: str | None = None) -> Sequence:
    return Sequence("a", token_ids, SamplingParams(), cache_salt=salt)


def publish(cache: PrefixCache, token_ids: list[int], *, salt: str | None = None, first: int = 1) -> Sequence:
    """A sequence that has computed all of `token_ids` in blocks `first`, `first + 1`, ..."""
    sequence = make_sequence(token_ids, salt=salt)
    sequence.block_table = list(range(first, first + -(-len(token_ids) // BLOCK_SIZE)))
    sequence.num_computed_tokens = len(token_ids)
    sequence.may_publish = True
    cache.publish(sequence)
    cache.check_invariants()
    return sequence


def find(cache: PrefixCache, token_ids: list[int], *, salt: str | None = None) -> list[int]:
    return [entry.block for entry in cache.find(make_sequence(token_ids, salt=salt))]


@pytest.mark.parametrize("length", [16, 32, 48])
def test_a_full_hit_on_a_block_boundary_leaves_a_token_to_compute(length: int) -> None:
    cache = PrefixCache(BLOCK_SIZE)
    tokens = list(range(length))
    publish(cache, tokens)
    assert find(cache, tokens) == list(range(1, length // BLOCK_SIZE))
    assert find(cache, [*tokens, 7]) == list(range(1, length // BLOCK_SIZE + 1))


@pytest.mark.parametrize("position", [0, 14, 15, 16, 17, 31, 32])
def test_prompts_that_differ_in_one_token_share_only_the_blocks_before_it(position: int) -> None:
    """The digest sees every token: both prompts are found whole afterwards, neither hides the other."""
    cache = PrefixCache(BLOCK_SIZE)
    tokens = list(range(48))
    other = list(tokens)
    other[position] = 99
    publish(cache, tokens, first=1)
    assert find(cache, [*other, 7]) == [1, 2, 3][: position // BLOCK_SIZE]
    publish(cache, other, first=11)
    assert find(cache, [*tokens, 7]) == [1, 2, 3]
    shared = position // BLOCK_SIZE
    assert find(cache, [*other, 7]) == [*[1, 2, 3][:shared], *[11, 12, 13][shared:]]


def test_only_what_is_computed_and_full_is_published() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    sequence = make_sequence(list(range(48)))
    sequence.block_table, sequence.num_computed_tokens = [1, 2, 3], 31
    cache.publish(sequence)
    assert find(cache, list(range(48))) == [1]
    sequence.num_computed_tokens = 47
    cache.publish(sequence)
    assert find(cache, list(range(48))) == [1, 2]


def test_salts_are_kept_apart_and_find_their_own() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    tokens = list(range(33))
    publish(cache, tokens, salt="a", first=1)
    for other in (None, "b", "", "aa"):
        assert find(cache, tokens, salt=other) == []
    publish(cache, tokens, salt="b", first=11)
    publish(cache, tokens, first=21)
    assert find(cache, tokens, salt="a") == [1, 2]
    assert find(cache, tokens, salt="b") == [11, 12]
    assert find(cache, tokens) == [21, 22]


def test_a_salt_and_a_model_of_the_same_name_are_not_the_same() -> None:
    roots = {
        root_digest(),
        root_digest(cache_salt="x"),
        root_digest(model_id="x"),
        root_digest(cache_salt="x", model_id="x"),
        root_digest(cache_salt="x5:model:1:x"),
        root_digest(cache_salt=""),
    }
    assert len(roots) == 6


def test_digests_depend_on_every_token_and_on_the_parent() -> None:
    tokens = list(range(16))
    root = root_digest()
    digests = {block_digest(root, tokens), block_digest(block_digest(root, tokens), tokens)}
    for position in range(16):
        digests.add(block_digest(root, [*tokens[:position], 300, *tokens[position + 1 :]]))
    assert len(digests) == 18
    assert {len(digest) for digest in digests} == {16}


@pytest.mark.parametrize(
    "stub", [lambda parent, tokens: b"same", lambda parent, tokens: bytes(tokens)], ids=["all", "no parent"]
)
def test_a_forced_collision_is_rejected(monkeypatch: pytest.MonkeyPatch, stub: object) -> None:
    monkeypatch.setattr(prefix_cache, "block_digest", stub)
    monkeypatch.setattr(prefix_cache, "root_digest", lambda **fields: b"root")
    cache = PrefixCache(BLOCK_SIZE)
    one, other, tail = [1] * 16, [2] * 16, [3] * 16
    publish(cache, one + tail, salt="a", first=1)
    publish(cache, other + tail, salt="a", first=11)
    assert find(cache, [*one, *one, 7], salt="a") == [1]
    assert find(cache, [*tail, 7], salt="a") == []
    assert find(cache, [*one, 7], salt="b") == []
    assert 2 not in find(cache, [*other, *tail, 7], salt="a")


def test_a_predecessor_that_came_back_with_a_colliding_digest_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_cache, "block_digest", lambda parent, tokens: bytes([tokens[-1]]))
    cache = PrefixCache(BLOCK_SIZE)
    one, other, tail = [1] * 16, [2] * 15 + [1], [3] * 16
    publish(cache, one + tail, first=1)
    cache.forget(1)
    publish(cache, other, first=11)
    assert find(cache, [*other, *tail, 7]) == [11]


def test_the_second_copy_of_a_block_stays_private_and_what_follows_it_does_not() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    tokens = list(range(32))
    publish(cache, tokens[:16], first=1)
    publish(cache, tokens, first=11)
    assert (1 in cache, 11 in cache, 12 in cache) == (True, False, True)
    assert find(cache, [*tokens, 7]) == [1, 12]


def test_nothing_is_published_behind_what_was_evicted() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    tokens = list(range(48))
    publish(cache, tokens[:16], first=1)
    sequence = publish(cache, tokens[:32], first=11)
    cache.forget(1)
    cache.forget(12)
    sequence.token_ids = tokens
    sequence.block_table, sequence.num_computed_tokens = [11, 12, 13], 48
    cache.publish(sequence)
    assert (13 in cache, sequence.may_publish) == (False, False)


def test_no_block_is_hashed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(
        prefix_cache,
        "block_digest",
        lambda parent, tokens: calls.append(tokens) or block_digest(parent, tokens),
    )
    cache = PrefixCache(BLOCK_SIZE)
    sequence = make_sequence(list(range(64)))
    for _ in range(3):
        cache.find(sequence)
    sequence.block_table, sequence.num_computed_tokens = [1, 2, 3, 4], 64
    cache.publish(sequence)
    cache.find(sequence.fork(1))
    assert len(calls) == 4


@pytest.mark.parametrize("broken", ["_by_digest", "_by_block"])
def test_the_check_notices_a_broken_bijection(broken: str) -> None:
    cache = PrefixCache(BLOCK_SIZE)
    publish(cache, list(range(32)))
    getattr(cache, broken).popitem()
    with pytest.raises(AssertionError):
        cache.check_invariants()
    publish(cache := PrefixCache(BLOCK_SIZE), list(range(32)))
    index = getattr(cache, broken)
    first, second = index
    index[first], index[second] = index[second], index[first]
    with pytest.raises(AssertionError):
        cache.check_invariants()
