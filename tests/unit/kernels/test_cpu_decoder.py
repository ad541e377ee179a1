"""The compiled layers refuse what they would read or write beyond its end."""

from dataclasses import replace

import pytest
import torch

from tessera_cli.attention import AttentionLayer
from tessera_cli.kernels.backend import AttentionMetadata
from tessera_cli.kernels.cpu import CpuAttention
from tessera_cli.kernels.cpu_decoder import CpuDecoder, LayerWeights, Projection
from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
from tessera_cli.kernels.float32_linear import Float32Linear

HIDDEN, INNER, HEAD_DIM = 24, 40, 8
SPEC = AttentionLayer(4, 2, HEAD_DIM, HEAD_DIM**-0.5, None, None)


@pytest.fixture
def library() -> CpuLibrary:
    library = load_library()
    if not isinstance(library, CpuLibrary):
        pytest.skip(library)
    return library


def projection(library: CpuLibrary, outputs: int, inputs: int) -> Projection:
    return Projection(Float32Linear(library, torch.zeros(outputs, inputs)), None)


def layer(library: CpuLibrary, *, hidden: int = HIDDEN, inner: int = INNER) -> LayerWeights:
    queries, keys = 4 * HEAD_DIM, 2 * HEAD_DIM
    sizes = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
    products = tuple(projection(library, *size) for size in sizes)
    return LayerWeights(torch.ones(hidden), torch.ones(hidden), products, True)


def build(
    library: CpuLibrary, *layers: LayerWeights, hidden: int = HIDDEN, num_caches: int = 1
) -> CpuDecoder:
    attention = CpuAttention(
        [SPEC] * num_caches,
        num_blocks=3,
        block_size=8,
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        device="cpu",
    )
    return CpuDecoder(library, attention, layers, norm=torch.ones(hidden), eps=1e-6)


def test_sizes_that_do_not_fit_each_other_are_refused(library: CpuLibrary) -> None:
    whole = layer(library)
    build(library, whole)
    for place in range(4):
        products = list(whole.projections)
        products[place] = projection(library, 8, 8)
        with pytest.raises(ValueError, match="products of"):
            build(library, replace(whole, projections=tuple(products)))
    with pytest.raises(ValueError, match="norms of"):
        build(library, replace(whole, post_norm=torch.ones(HIDDEN - 8)))
    with pytest.raises(ValueError, match="products of"):
        build(library, whole, hidden=HIDDEN + 8)
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 is longer"):
        build(library, whole, num_caches=2)


@pytest.mark.parametrize(("hidden", "inner"), [(20, INNER), (HIDDEN, 36)])
def test_widths_that_are_no_multiples_are_refused(library: CpuLibrary, hidden: int, inner: int) -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        build(library, layer(library, hidden=hidden, inner=inner), hidden=hidden)


def test_activations_and_tables_of_another_shape_are_refused(library: CpuLibrary) -> None:
    decoder = build(library, layer(library))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32),
        seq_lens=torch.tensor([2], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        slot_mapping=torch.tensor([8, 9]),
        max_query_len=2,
        max_seq_len=2,
    )
    x, part = torch.zeros(2, HIDDEN), torch.zeros(2, 1, HEAD_DIM)
    assert decoder(metadata, x, (part, part)).shape == (2, HIDDEN)
    for wrong in (x.double(), x[:1], x[:, :16].contiguous(), torch.zeros(HIDDEN, 2).T):
        with pytest.raises(ValueError, match="expected contiguous float32"):
            decoder(metadata, wrong, (part, part))
    for wrong in (part.double(), part[:1], part[..., :4].contiguous(), part.flatten()):
        with pytest.raises(ValueError, match="expected contiguous float32"):
            decoder(metadata, x, (part, wrong))
