"""`CudaAttention` against the definition; its kernels' own source runs on the CPU, by tests/cuda_shim."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.kernels import cuda
from tessera_cli.kernels.backend import AttentionMetadata
from tessera_cli.kernels.cuda_arguments import AttentionArguments, CopyArguments, WriteArguments
from tessera_cli.kernels.cuda_plan import layer_kernels
from tests.cuda_shim.build import COMPILER, ShimKernels, build
from tests.unit.kernels import parity
from tests.unit.kernels.parity import Case, Scene

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the kernels' source needs g++ to run on the CPU")

HALF, BFLOAT, FLOAT, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.int8
FP8 = torch.float8_e4m3fn
RAGGED = ((70, 3, 130, 1, 17), (1, 1, 5, 1, 17))
# Every kernel family, with and without conversion, in both shapes; the plain kernel has most of the cases.
TYPES = [
    *((8, FLOAT, FLOAT), (16, FLOAT, FLOAT), (32, FLOAT, FLOAT), (16, FLOAT, HALF), (16, FLOAT, BFLOAT)),
    *((16, FLOAT, INT8), (16, HALF, FLOAT), (8, HALF, HALF), (16, HALF, HALF), (16, HALF, INT8)),
    *((16, BFLOAT, BFLOAT), (16, BFLOAT, INT8), (80, FLOAT, FLOAT), (64, HALF, HALF), (80, HALF, HALF)),
    *((96, BFLOAT, BFLOAT), (128, BFLOAT, BFLOAT), (256, HALF, HALF), (64, HALF, INT8), (256, BFLOAT, INT8)),
    *(
        (8, FLOAT, FP8),
        (16, FLOAT, FP8),
        (16, HALF, FP8),
        (16, BFLOAT, FP8),
        (64, HALF, FP8),
        (256, BFLOAT, FP8),
    ),
]
Attend = Callable[..., cuda.CudaAttention]


def instances() -> list[str]:
    """The C++ names of all kernels that these tests run."""
    kernels = [layer_kernels(_layer(head_dim), dtype, stored) for head_dim, dtype, stored in TYPES]
    return sorted({"copy_blocks", *(name for layer in kernels for name in layer.names)})


def _layer(head_dim: int) -> AttentionLayer:
    return AttentionLayer(2, 1, head_dim, 1.0, None, None)


class HistoriesUnattended(cuda.CudaAttention):
    """Does not attend for `Scene.write`, whose queries are zeros: only what it stores is wanted."""

    def attend(self, metadata: AttentionMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.any():
            return super().attend(metadata, layer, q, k, v)
        self._write(metadata, layer, k, v)
        return q


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    root = tmp_path_factory.getbasetemp()
    return build(instances(), (root if worker_id == "master" else root.parent) / "cuda_shim")


@pytest.fixture
def kernels(library: Path, monkeypatch: pytest.MonkeyPatch) -> ShimKernels:
    kernels = ShimKernels(library)
    monkeypatch.setattr(cuda, "load_kernels", kernels.load)
    return kernels


def _plain_cases() -> list[Case]:
    return [case for case in parity.cases() if case.head_dim in (8, 16, 80) and case.dtype == FLOAT]


@pytest.mark.parametrize("case", _plain_cases(), ids=str)
def test_float32_equals_the_definition(kernels: ShimKernels, case: Case) -> None:
    parity.check(HistoriesUnattended, case)
    assert any(name.startswith("attend_plain") for name in kernels.launched)


def _tensor_core_cases() -> list[Case]:
    """16-bit queries: every shape of the kernel, then what changes its masks, splits and addresses."""
    shapes = [
        Case(f"{head_dim} {dtype} {stored}", *RAGGED, head_dim=head_dim, dtype=dtype, kv_cache_dtype=stored)
        for head_dim, dtype, stored in TYPES
        if dtype != FLOAT
    ]
    small = {"head_dim": 16, "dtype": HALF, "kv_cache_dtype": HALF}
    return [
        *shapes,
        *(Case(f"{n} new tokens", (40 + n,), (n,), **small) for n in (*range(1, 34), 65)),
        *(Case(f"decode at {n}", (n,), (1,), **small) for n in (1, 15, 16, 17, 63, 64, 65, 127, 128, 129)),
        *(Case(f"group of {n}", *RAGGED, heads=2 * n, **small) for n in (1, 2, 4, 5, 6, 7, 8, 11, 16, 17)),
        *(Case(f"blocks of {n}", *RAGGED, block_size=n, **small) for n in (8, 32, 64, 128)),
        *(Case(f"window of {n}", *RAGGED, window=n, **small) for n in (1, 3, 16, 17, 63, 64, 65, 1000)),
        *(Case(f"window of {n}, chunk", (150,), (70,), window=n, **small) for n in (1, 5, 64, 100)),
        *(Case(f"cap of {n}", *RAGGED, soft_cap=n, scale=1.0, window=20, **small) for n in (0.5, 30.0)),
        Case("sequences without a token", (0, 20, 9, 0, 5, 0), (0, 1, 0, 0, 5, 0), **small),
        Case("shared blocks", (40, 40, 55), (1, 3, 23), shared=2, **small),
        Case("many sequences", tuple(range(1, 71)), (1,) * 70, **small),
        Case("one long sequence", (4096,), (1,), **small),
    ]


@pytest.mark.parametrize("case", _tensor_core_cases(), ids=str)
def test_sixteen_bits_equal_the_definition(kernels: ShimKernels, case: Case) -> None:
    parity.check(HistoriesUnattended, case)
    tensor_cores = any(name.startswith("attend_tensor_core") for name in kernels.launched)
    assert tensor_cores == (case.head_dim % 16 == 0 and case.kv_cache_dtype in (case.dtype, INT8, FP8))


@pytest.mark.parametrize("holds", parity.PROPERTIES, ids=lambda check: check.__name__)
def test_it_has_the_properties_of_every_backend(
    kernels: ShimKernels, holds: Callable[[Attend], None]
) -> None:
    holds(HistoriesUnattended)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("queries", [1, 21])
def test_any_number_of_splits_gives_the_same(
    kernels: ShimKernels, dtype: torch.dtype, window: int | None, queries: int
) -> None:
    case = Case("splits", (700, 40, 520), (queries, 1, 1), window=window, dtype=dtype, kv_cache_dtype=dtype)
    for num_multiprocessors in (1, 3, 40):
        kernels.num_multiprocessors = num_multiprocessors
        kernels.launched.clear()
        parity.check(HistoriesUnattended, case)
        merges = any(name.startswith("merge_splits") for name in kernels.launched)
        assert merges or num_multiprocessors < 40


def _deterministic(*args: object, **options: object) -> cuda.CudaAttention:
    torch.use_deterministic_algorithms(True)
    try:
        return HistoriesUnattended(*args, **options)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("window", [None, 70])
def test_deterministic_bits_depend_neither_on_neighbours_nor_on_the_chunk(
    kernels: ShimKernels, dtype: torch.dtype, window: int | None
) -> None:
    together = Case("together", (1200, 2100, 5), (40, 1, 5), window=window, dtype=dtype, kv_cache_dtype=dtype)
    scene = Scene.of(together)
    whole = scene.run(_deterministic)
    kernels.num_multiprocessors = 90
    for first, last in ((0, 1), (7, 40), (39, 40)):
        alone = Case(
            "alone", (1160 + last,), (last - first,), window=window, dtype=dtype, kv_cache_dtype=dtype
        )
        keys, values = [scene.keys[0][: 1160 + last]], [scene.values[0][: 1160 + last]]
        part = Scene(alone, scene.tables[:1], scene.num_blocks, keys, values, scene.q[first:last])
        assert torch.equal(part.run(_deterministic), whole[first:last])


def test_rows_may_lie_apart_as_in_a_fused_projection(kernels: ShimKernels) -> None:
    scene = Scene.of(Case("fused", *RAGGED, dtype=HALF, kv_cache_dtype=HALF))
    backend = scene.backend(HistoriesUnattended)
    scene.fill(backend)
    expected = scene.attend(backend)
    fused = torch.cat([scene.q, scene.new(scene.keys), scene.new(scene.values)], dim=1)
    out = backend.attend(scene.metadata(), 1, *fused.split([6, 2, 2], dim=1))
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_a_captured_graph_may_hold_fewer_tokens_and_sequences_than_it_was_captured_for(
    kernels: ShimKernels, dtype: torch.dtype
) -> None:
    """What the host says are upper bounds; sequences of no tokens and slots of -1 fill up."""
    scene = Scene.of(Case("graph", (70, 600), (1, 3), dtype=dtype, kv_cache_dtype=dtype))
    backend = scene.backend(HistoriesUnattended)
    scene.fill(backend)
    expected = scene.attend(backend)
    exact = scene.metadata()
    padded = AttentionMetadata(
        query_start_loc=torch.cat([exact.query_start_loc, torch.tensor([4, 4])]).int(),
        seq_lens=torch.cat([exact.seq_lens, torch.tensor([0, 0])]).int(),
        block_tables=torch.cat([exact.block_tables, torch.zeros_like(exact.block_tables)]),
        slot_mapping=torch.cat([exact.slot_mapping, torch.full((5,), -1)]),
        max_query_len=8,
        max_seq_len=2048,
    )
    q, k, v = (
        torch.cat([rows, torch.full_like(rows[:1], torch.nan).expand(5, -1, -1)])
        for rows in (scene.q, scene.new(scene.keys), scene.new(scene.values))
    )
    out = backend.attend(padded, 1, q, k, v)
    tolerance = {"atol": 2e-3, "rtol": 1e-2} if dtype == HALF else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(out[:4], expected, **tolerance)


def test_the_order_of_threads_and_blocks_does_not_matter(kernels: ShimKernels) -> None:
    scene = Scene.of(Case("order", *RAGGED, head_dim=64, dtype=HALF, kv_cache_dtype=INT8))
    forward = scene.run(HistoriesUnattended)
    kernels.reverse = True
    assert torch.equal(scene.run(HistoriesUnattended), forward)


def test_quantises_as_the_reference_does(kernels: ShimKernels) -> None:
    scene = Scene.of(Case("stored", (40,), (40,), kv_cache_dtype=INT8))
    scene.keys[0][3] = 0
    backend = scene.backend(HistoriesUnattended)
    scene.attend(backend)
    steps, scales = parity.quantise(scene.keys[0])
    slots = scene.metadata().slot_mapping
    assert torch.equal(backend.key_caches[1].elements.flatten(0, 1)[slots], steps)
    assert torch.equal(backend.key_caches[1].scales.flatten(0, 1)[slots], scales)


def test_structures_are_as_large_as_the_source_says(kernels: ShimKernels) -> None:
    for structure in (AttentionArguments, WriteArguments, CopyArguments):
        assert kernels.bytes_of(structure.__name__) == ctypes.sizeof(structure)


def test_no_tokens_give_no_rows_and_start_nothing(kernels: ShimKernels) -> None:
    scene = Scene.of(Case("nothing", (0, 5), (0, 0)))
    backend = scene.backend(cuda.CudaAttention)
    assert scene.attend(backend).shape == (0, 6, 16)
    assert kernels.launched == []


def test_blocks_cannot_be_copied_in_a_circle_or_onto_the_null_block(kernels: ShimKernels) -> None:
    backend = Scene.of(Case("circle", (40,), (1,))).backend(cuda.CudaAttention)
    with pytest.raises(ValueError, match="in a circle"):
        backend.copy_blocks([(1, 2), (2, 1)])
    with pytest.raises(ValueError, match="null block"):
        backend.copy_blocks([(1, 0)])


def test_shapes_and_dtypes_that_are_not_the_layers_are_refused(kernels: ShimKernels) -> None:
    scene = Scene.of(Case("shapes", (5,), (2,)))
    backend = scene.backend(cuda.CudaAttention)
    q, k, v = scene.q, scene.new(scene.keys), scene.new(scene.values)
    for wrong in ((q[:, :5], k, v), (q, k[:1], v), (q, k, v.half()), (q[..., :8], k, v)):
        with pytest.raises(ValueError, match=r"not torch\.float32"):
            backend.attend(scene.metadata(), 0, *wrong)


@pytest.mark.parametrize("block_size", [1, 4, 24, 256])
def test_a_block_size_that_the_kernels_lack_is_refused(kernels: ShimKernels, block_size: int) -> None:
    with pytest.raises(UsageError, match=f"no blocks of {block_size} tokens"):
        Scene.of(Case("blocks", (5,), (1,), block_size=block_size)).backend(cuda.CudaAttention)


def test_a_machine_without_cuda_is_told_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert cuda.find_obstacle() == "PyTorch finds no CUDA device"
