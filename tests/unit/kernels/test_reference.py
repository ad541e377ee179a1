"""Paged attention in plain torch against the definition of attention."""

from dataclasses import replace

import pytest
import torch

from tessera_cli.attention import AttentionLayer
from tessera_cli.kernels.reference import ReferenceAttention, _rows_of_similar_length
from tests.unit.kernels import parity
from tests.unit.kernels.parity import Case, Scene

_RAGGED = ((8, 12, 3, 17, 1, 30), (1, 5, 3, 1, 1, 2))
# Block sizes that compiled kernels do without.
_SMALL_BLOCKS = [Case(f"blocks of {size}", *_RAGGED, block_size=size) for size in (1, 3, 4)]


@pytest.mark.parametrize("case", [*parity.cases(), *_SMALL_BLOCKS], ids=str)
def test_equals_the_definition(case: Case) -> None:
    parity.check(ReferenceAttention, case)


@pytest.mark.parametrize("property_check", parity.PROPERTIES, ids=lambda check: check.__name__)
def test_holds_what_every_backend_has_to(property_check) -> None:
    property_check(ReferenceAttention)


def test_writes_only_the_slots_of_new_tokens_and_never_the_null_block() -> None:
    scene = Scene.of(Case("writes", *_RAGGED))
    attention = scene.backend(ReferenceAttention)
    for caches, histories in (
        (attention.key_caches, scene.keys),
        (attention.value_caches, scene.values),
    ):
        for cache in caches:
            cache.elements.zero_()
        scene.attend(attention)
        written = caches[1].elements.flatten(0, 1).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert set(written) == set(scene.metadata().slot_mapping.tolist())
        assert not caches[0].elements.any()
        for sequence, history in enumerate(histories):
            slot = scene.slot(sequence, len(history) - 1)
            assert torch.equal(caches[1].elements.flatten(0, 1)[slot], history[-1])


@pytest.mark.parametrize("window", [1, 5, 16, 17])
def test_blocks_before_the_window_are_not_read(window: int) -> None:
    """A table whose entries before the window are gone, as they may be freed, gives the same bits."""
    scene = Scene.of(Case("window", (70, 41), (1, 3), window=window))
    attention = scene.backend(ReferenceAttention)
    scene.poison(attention)
    scene.fill(attention)
    expected = scene.attend(attention)
    for table, length, query in zip(scene.tables, scene.case.lengths, scene.case.queries, strict=True):
        for block in range((length - query - window + 1) // 16):
            table[block] = 0
    assert scene.tables[0][0] == 0
    assert torch.equal(scene.attend(attention), expected)


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float16, 4e-4), (torch.bfloat16, 3e-3), (torch.int8, 1e-2), (torch.float8_e4m3fn, 4.5e-2)],
)
def test_a_smaller_cache_costs_no_more_than_is_documented(dtype: torch.dtype, bound: float) -> None:
    exact = Case("errors", (200, 90), (40, 1), heads=9, kv_heads=3, head_dim=64)
    expected = Scene.of(exact).run(ReferenceAttention)
    out = Scene.of(replace(exact, kv_cache_dtype=dtype)).run(ReferenceAttention)
    error = float((out - expected).norm() / expected.norm())
    assert bound / 10 < error < bound


def test_the_null_block_is_never_a_copy() -> None:
    attention = Scene.of(Case("copies", *_RAGGED)).backend(ReferenceAttention)
    with pytest.raises(ValueError, match="null block"):
        attention.copy_blocks([(1, 0)])


def test_a_step_without_tokens_is_nothing() -> None:
    layer = AttentionLayer(2, 1, 8, 1.0, None, None)
    attention = Scene.of(Case("empty", (0, 0), (0, 0), heads=2, kv_heads=1, head_dim=8))
    assert attention.attend(attention.backend(ReferenceAttention)).shape == (0, layer.num_heads, 8)


def test_groups_hold_every_row_once_and_pad_no_row_beyond_twice_its_length() -> None:
    lengths = torch.randint(1, 1000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    groups = _rows_of_similar_length(list(range(0, 200, 2)), lengths)
    assert sorted(row for group in groups for row in group) == list(range(0, 200, 2))
    for group in groups:
        assert max(lengths[row] for row in group) == lengths[group[0]]
        assert all(lengths[group[0]] <= 2 * lengths[row] for row in group)
    assert len(groups) <= 10  # as many as 1000 has halves
