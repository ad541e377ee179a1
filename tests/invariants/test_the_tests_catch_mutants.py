"""The tests of the prefix cache fail where it is broken in ways that other engines' tests have missed."""

from collections.abc import Callable
from typing import Any

import pytest

from tessera_cli.engine import prefix_cache
from tessera_cli.engine.prefix_cache import PrefixCache, PublishedBlock
from tests.invariants import test_prefix_cache_changes_nothing as end_to_end
from tests.unit.engine import test_block_pool, test_prefix_cache


def _ignore_the_last_token_in_the_digest(patch: pytest.MonkeyPatch) -> None:
    digest = prefix_cache.block_digest
    patch.setattr(prefix_cache, "block_digest", lambda parent, tokens: digest(parent, tokens[:-1]))


def _ignore_the_last_token_altogether(patch: pytest.MonkeyPatch) -> None:
    _ignore_the_last_token_in_the_digest(patch)
    holds = PublishedBlock.holds

    def lax(self: PublishedBlock, tokens: list[int], *rest: Any) -> bool:
        return holds(self, [*tokens[:-1], self.token_ids[-1]], *rest)

    patch.setattr(PublishedBlock, "holds", lax)


def _keep_the_digest_of_what_is_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixCache, "forget", lambda self, block: None)


def _ignore_the_salt_in_the_digest(patch: pytest.MonkeyPatch) -> None:
    root = prefix_cache.root_digest
    patch.setattr(prefix_cache, "root_digest", lambda **fields: root())


def _ignore_the_salt_altogether(patch: pytest.MonkeyPatch) -> None:
    _ignore_the_salt_in_the_digest(patch)
    holds = PublishedBlock.holds
    patch.setattr(PublishedBlock, "holds", lambda self, *rest: holds(self, *rest[:2], self.cache_salt))


def _believe_the_digest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PublishedBlock, "holds", lambda self, *wanted: True)


def _leave_no_token_to_compute(patch: pytest.MonkeyPatch) -> None:
    find = PrefixCache.find

    def greedy(self: PrefixCache, sequence: Any) -> list[PublishedBlock]:
        sequence.token_ids.append(0)
        try:
            return find(self, sequence)
        finally:
            sequence.token_ids.pop()
            sequence.block_digests.clear()

    patch.setattr(PrefixCache, "find", greedy)


@pytest.mark.parametrize(
    ("mutate", "test", "arguments"),
    [
        (
            _ignore_the_last_token_in_the_digest,
            test_prefix_cache.test_prompts_that_differ_in_one_token_share_only_the_blocks_before_it,
            (15,),
        ),
        (
            _ignore_the_last_token_in_the_digest,
            end_to_end.test_prompts_that_differ_in_one_token_find_each_their_own,
            (15,),
        ),
        (
            _ignore_the_last_token_altogether,
            end_to_end.test_prompts_that_differ_in_one_token_find_each_their_own,
            (15,),
        ),
        (_keep_the_digest_of_what_is_evicted, test_block_pool.test_what_is_evicted_is_forgotten, ()),
        (
            _keep_the_digest_of_what_is_evicted,
            end_to_end.test_an_evicted_prefix_is_missed_when_its_blocks_hold_something_else,
            (),
        ),
        (_ignore_the_salt_in_the_digest, end_to_end.test_salts_find_their_own_and_nothing_of_others, ()),
        (_ignore_the_salt_altogether, end_to_end.test_salts_find_their_own_and_nothing_of_others, ()),
        (_ignore_the_salt_altogether, test_prefix_cache.test_salts_are_kept_apart_and_find_their_own, ()),
        (_leave_no_token_to_compute, end_to_end.test_a_prompt_of_whole_blocks_can_be_repeated, (32,)),
    ],
)
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
    test: Callable[..., None],
    arguments: tuple[int, ...],
) -> None:
    test(*arguments)
    mutate(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        test(*arguments)


@pytest.mark.parametrize("tokens_in_digest", [0, 1])
def test_a_cache_that_believes_its_digests_is_caught(
    monkeypatch: pytest.MonkeyPatch, tokens_in_digest: int
) -> None:
    _believe_the_digest(monkeypatch)
    with pytest.raises(AssertionError):
        end_to_end.test_colliding_digests_change_no_output(monkeypatch, tokens_in_digest)
