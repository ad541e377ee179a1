"""Paged attention against the definition of attention, written with loops in float64."""

import math

import pytest
import torch
from torch import Tensor

from tessera_cli.kernels.backend import AttentionMetadata
from tessera_cli.kernels.reference import ReferenceAttention, _rows_of_similar_length

HEAD_DIM = 8


class Scene:
    """Sequences with random histories in a shuffled pool; of `lengths` tokens the last `queries` are new."""

    def __init__(
        self,
        lengths: list[int],
        queries: list[int],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        block_size: int = 4,
    ) -> None:
        torch.manual_seed(0)
        self.lengths, self.queries, self.block_size = lengths, queries, block_size
        counts = [-(-length // block_size) for length in lengths]
        blocks = (torch.randperm(sum(counts) + 2) + 1).tolist()  # two more than are used
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        self.attention = ReferenceAttention(
            num_layers=2,
            num_blocks=sum(counts) + 3,
            block_size=block_size,
            num_kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device="cpu",
        )
        self.keys = [torch.randn(length, kv_heads, HEAD_DIM) for length in lengths]
        self.values = [torch.randn(length, kv_heads, HEAD_DIM) for length in lengths]
        self.q = torch.randn(sum(queries), heads, HEAD_DIM)

    def slot(self, sequence: int, position: int) -> int:
        block = self.tables[sequence][position // self.block_size]
        return block * self.block_size + position % self.block_size

    def fill_cache(self, layer: int, poison: float) -> None:
        """The histories in place, `poison` in every other slot but the null block's."""
        for cache, histories in (
            (self.attention.key_cache[layer], self.keys),
            (self.attention.value_cache[layer], self.values),
        ):
            cache[1:] = poison
            for sequence, history in enumerate(histories):
                for position in range(self.lengths[sequence] - self.queries[sequence]):
                    cache.flatten(0, 1)[self.slot(sequence, position)] = history[position]

    def metadata(self) -> AttentionMetadata:
        new = [
            (sequence, position)
            for sequence, (length, query) in enumerate(zip(self.lengths, self.queries, strict=True))
            for position in range(length - query, length)
        ]
        widest = max(map(len, self.tables))
        return AttentionMetadata(
            query_start_loc=torch.tensor([0, *self.queries]).cumsum(0).int(),
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
            block_tables=torch.tensor(
                [table + [0] * (widest - len(table)) for table in self.tables], dtype=torch.int32
            ),
            slot_mapping=torch.tensor([self.slot(*place) for place in new]),
            max_query_len=max(self.queries),
            max_seq_len=max(self.lengths),
        )

    def new(self, histories: list[Tensor]) -> Tensor:
        return torch.cat([h[-query:] for h, query in zip(histories, self.queries, strict=True)])

    def attend(self, layer: int = 0) -> Tensor:
        return self.attention.attend(
            self.metadata(), layer, self.q, self.new(self.keys), self.new(self.values)
        )

    def expected(self) -> Tensor:
        rows = []
        starts = torch.tensor([0, *self.queries]).cumsum(0).tolist()
        for sequence, (length, query) in enumerate(zip(self.lengths, self.queries, strict=True)):
            keys, values = self.keys[sequence].double(), self.values[sequence].double()
            group = self.q.shape[1] // keys.shape[1]
            for index in range(query):
                visible = length - query + index + 1
                for head in range(self.q.shape[1]):
                    q = self.q[starts[sequence] + index, head].double()
                    scores = keys[:visible, head // group] @ q / math.sqrt(HEAD_DIM)
                    rows.append(scores.softmax(0) @ values[:visible, head // group])
        return torch.stack(rows).view(self.q.shape)


SCENES = {
    "decodes": ([5, 1, 16, 9], [1, 1, 1, 1]),
    "decodes of very different lengths": ([70, 3, 33, 1, 2], [1, 1, 1, 1, 1]),
    "whole prompts": ([7, 4, 13], [7, 4, 13]),
    "chunks after a history": ([9, 21, 6], [3, 5, 2]),
    "all at once": ([8, 12, 3, 17, 1, 30], [1, 5, 3, 1, 1, 2]),
}


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (3, 1)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_equals_the_definition(name: str, heads: int, kv_heads: int, block_size: int) -> None:
    scene = Scene(*SCENES[name], heads=heads, kv_heads=kv_heads, block_size=block_size)
    scene.fill_cache(0, poison=0.0)
    torch.testing.assert_close(scene.attend().double(), scene.expected(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", SCENES)
def test_what_unused_slots_hold_never_shows(name: str) -> None:
    scene = Scene(*SCENES[name])
    scene.fill_cache(0, poison=0.0)
    clean = scene.attend()
    scene.fill_cache(0, poison=math.nan)
    assert torch.equal(scene.attend(), clean)


def test_later_tokens_of_a_chunk_do_not_reach_earlier_ones() -> None:
    scene = Scene([11], [6])
    scene.fill_cache(0, poison=0.0)
    before = scene.attend()
    scene.keys[0][-1] += 3
    scene.values[0][-1] += 3
    after = scene.attend()
    assert torch.equal(after[:-1], before[:-1])
    assert not torch.allclose(after[-1], before[-1])


def test_layers_have_caches_of_their_own() -> None:
    scene = Scene(*SCENES["all at once"])
    scene.attention.key_cache.zero_()
    scene.fill_cache(1, poison=0.0)
    torch.testing.assert_close(scene.attend(layer=1).double(), scene.expected(), atol=2e-6, rtol=1e-5)
    assert not scene.attention.key_cache[0].any()


def test_writes_only_the_slots_of_new_tokens_and_never_the_null_block() -> None:
    scene = Scene(*SCENES["all at once"])
    scene.attention.key_cache.zero_()
    scene.attention.value_cache.zero_()
    scene.attend()
    slots = set(scene.metadata().slot_mapping.tolist())
    for cache, histories in (
        (scene.attention.key_cache[0], scene.keys),
        (scene.attention.value_cache[0], scene.values),
    ):
        written = cache.flatten(0, 1).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert set(written) == slots
        assert not cache[0].any()
        for sequence, history in enumerate(histories):
            last = scene.lengths[sequence] - 1
            assert torch.equal(cache.flatten(0, 1)[scene.slot(sequence, last)], history[last])


def test_the_null_block_is_zero_whatever_the_memory_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, torch.nan, **options))
    attention = Scene([4, 3], [4, 3]).attention
    for cache in (attention.key_cache, attention.value_cache):
        assert torch.equal(cache[:, 0], torch.zeros_like(cache[:, 0]))
        assert bool(cache[:, 1:].isnan().all())


def test_slot_minus_one_is_skipped() -> None:
    scene = Scene([4, 3], [4, 3])
    scene.attention.key_cache.zero_()
    metadata = scene.metadata()
    metadata.slot_mapping[2] = -1
    scene.attention.attend(metadata, 0, scene.q, scene.new(scene.keys), scene.new(scene.values))
    written = scene.attention.key_cache[0].flatten(0, 1).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert set(written) == set(metadata.slot_mapping.tolist()) - {-1}
    assert torch.equal(scene.attention.key_cache[0].flatten(0, 1)[scene.slot(1, 0)], scene.keys[1][0])


def test_groups_hold_every_row_once_and_pad_no_row_beyond_twice_its_length() -> None:
    lengths = torch.randint(1, 1000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = _rows_of_similar_length(list(range(0, 200, 2)), lengths)
    assert sorted(row for group in groups for row in group) == list(range(0, 200, 2))
    for group in groups:
        assert max(lengths[row] for row in group) == lengths[group[0]]
        assert all(lengths[group[0]] <= 2 * lengths[row] for row in group)
    assert len(groups) <= 10  # as many as 1000 has halves
