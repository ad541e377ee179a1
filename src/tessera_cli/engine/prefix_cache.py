"""Which blocks hold the keys and values of which tokens, found by a chained digest and checked by content.

A digest names a block's tokens and all tokens before them. It only finds a block: a hit is one whose
tokens, salt and predecessor are the wanted ones themselves, so two texts that collide in the digest never
share a block.
"""

import hashlib
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from tessera_cli.engine.sequence import Sequence

_DIGEST_SIZE = 16  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class PublishedBlock:
    """A full block that others may share; equal only to itself, so that a chain of them is one certain text.

    `parent` is the block before it, None for the first of a sequence.
    """

    digest: bytes
    block: int
    token_ids: list[int]
    parent: "PublishedBlock | None"
    cache_salt: str | None

    def holds(self, token_ids: list[int], parent: "PublishedBlock | None", cache_salt: str | None) -> bool:
        """Whether it is the block of these tokens after `parent`."""
        return self.parent is parent and self.token_ids == token_ids and self.cache_salt == cache_salt


def root_digest(*, cache_salt: str | None = None, model_id: str | None = None) -> bytes:
    """What a sequence's digests start from, so that nothing of another salt or another model fits."""
    fields = ((b"salt", cache_salt), (b"model", model_id))
    return _digest((tag, value.encode(errors="surrogatepass")) for tag, value in fields if value is not None)


def block_digest(parent: bytes, token_ids: SequenceOf[int]) -> bytes:
    """The digest of a block of `token_ids` after the block, or the root, whose digest is `parent`."""
    return _digest(((b"parent", parent), (b"tokens", array("q", token_ids).tobytes())))


def _digest(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """BLAKE2b (RFC 7693) of tagged fields, each with its length: none reads as part of another."""
    parts: list[bytes] = []
    for tag, value in fields:
        parts += (b"%b:%d:" % (tag, len(value)), value)
    return hashlib.blake2b(b"".join(parts), digest_size=_DIGEST_SIZE).digest()


class PrefixCache:
    """The published blocks of a pool, in a bijection between digests and blocks.

    It knows neither references nor which blocks are free: the pool tells it what is evicted, and the
    scheduler what is computed.

    Attributes:
        num_queries: tokens that were looked for.
        num_hits: tokens of these that were found.
        num_missed: blocks that were looked for after they had been evicted, since all was forgotten.
    """

    def __init__(self, block_size: int) -> None:
        self.num_queries = 0
        self.num_hits = 0
        self.num_missed = 0
        self._block_size = block_size
        self._by_digest: dict[bytes, PublishedBlock] = {}
        self._by_block: dict[int, PublishedBlock] = {}
        self._evicted: dict[bytes, None] = {}  # digests, the one evicted longest ago first

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def find(self, sequence: Sequence) -> list[PublishedBlock]:
        """The published leading blocks of `sequence`, at most as many as leave one token to compute.

        Where log-probabilities of the prompt are asked for, those tokens are left that predict them.
        """
        found: list[PublishedBlock] = []
        num_tokens, params = len(sequence.token_ids) - 1, sequence.params
        if params.prompt_logprobs is not None:
            num_tokens = min(num_tokens, max(0, params.prompt_logprobs_start - 1))
        num_blocks = num_tokens // self._block_size
        digests = self._digests(sequence, num_blocks)
        parent: PublishedBlock | None = None
        start, token_ids, cache_salt = 0, sequence.token_ids, sequence.cache_salt
        for index in range(num_blocks):
            entry = self._by_digest.get(digests[index])
            end = start + self._block_size
            if entry is None or not entry.holds(token_ids[start:end], parent, cache_salt):
                break
            found.append(entry)
            parent, start = entry, end
        for digest in digests[len(found) : num_blocks]:
            if digest not in self._evicted:
                break
            del self._evicted[digest]  # a sequence that waits looks again
            self.num_missed += 1
        return found

    def publish(self, sequence: Sequence) -> None:
        """Let others share the full blocks that `sequence` has computed and not published yet.

        Where the same text is published already, the sequence's own block stays private. So do this block and
        all after it where nobody could find them: the block before has been evicted meanwhile, or the digest
        leads to another text.
        """
        num_full = sequence.num_computed_tokens // self._block_size
        digests = self._digests(sequence, num_full)
        for index in range(sequence.num_published_blocks, num_full):
            parent, digest = sequence.last_published, digests[index]
            tokens = sequence.token_ids[index * self._block_size : (index + 1) * self._block_size]
            is_lost = parent is not None and self._by_digest.get(parent.digest) is not parent
            entry = self._by_digest.get(digest)
            if is_lost or (entry is not None and not entry.holds(tokens, parent, sequence.cache_salt)):
                sequence.may_publish = False
                return
            if entry is None:
                block = sequence.block_table[index]
                entry = PublishedBlock(digest, block, tokens, parent, sequence.cache_salt)
                self._by_digest[digest] = self._by_block[block] = entry
            sequence.last_published = entry
            sequence.num_published_blocks = index + 1

    def forget(self, block: int) -> None:
        """Let nobody find `block` any more; nothing happens where it is not published."""
        entry = self._by_block.pop(block, None)
        if entry is not None:
            del self._by_digest[entry.digest]

    def evict(self, block: int, *, num_remembered: int) -> None:
        """Forget a published block, but know it again if it is looked for.

        Of those that were evicted the last `num_remembered` are known.
        """
        digest = self._by_block[block].digest
        self.forget(block)
        self._evicted.pop(digest, None)  # it may have been computed again without being looked for
        self._evicted[digest] = None
        if len(self._evicted) > num_remembered:
            del self._evicted[next(iter(self._evicted))]

    def clear(self) -> None:
        """Forget every block."""
        self.num_missed = 0
        self._evicted.clear()
        self._by_digest.clear()
        self._by_block.clear()

    def check_invariants(self) -> None:
        """Check that digests and blocks are a bijection.

        Raises:
            AssertionError: they are not.
        """
        if len(self._by_digest) != len(self._by_block):
            raise AssertionError(f"{len(self._by_digest)} digests name {len(self._by_block)} blocks")
        for block, entry in self._by_block.items():
            if entry.block != block or self._by_digest.get(entry.digest) is not entry:
                raise AssertionError(f"the digest of published block {block} does not lead back to it")

    def _digests(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The digests of at least `num_blocks` leading blocks; each is computed once in a sequence's life."""
        digests = sequence.block_digests
        for index in range(len(digests), num_blocks):
            parent = digests[-1] if digests else root_digest(cache_salt=sequence.cache_salt)
            start = index * self._block_size
            digests.append(block_digest(parent, sequence.token_ids[start : start + self._block_size]))
        return digests
