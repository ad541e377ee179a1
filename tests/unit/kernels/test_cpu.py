"""The compiled CPU attention against the definition of attention."""

import pytest
import torch

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.kernels import cpu
from tessera_cli.kernels.cpu import CpuAttention
from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
from tests.unit.kernels import parity
from tests.unit.kernels.parity import Case, Scene

pytestmark = pytest.mark.skipif(not isinstance(load_library(), CpuLibrary), reason=str(load_library()))

_PLAIN = AttentionLayer(6, 2, 16, 0.25, None, None)
# Long enough that keys are split, and wide enough for several tiles of rows.
_LONG = [
    Case("split decode", (1200, 257, 256, 255), (1,) * 4, head_dim=64),
    Case("split decode in a window", (1200, 700), (1, 3), window=300),
    Case("split verification", (900, 600), (5, 8), head_dim=64, soft_cap=20.0),
    Case("long prompt", (400,), (400,), head_dim=64),
    Case("long chunk after a history", (700, 40), (150, 1), head_dim=64),
    Case("long prompt in a window", (300,), (300,), window=50),
    Case("long prompt, large group", (130,), (100,), heads=20, kv_heads=1),
    Case("group above a tile", (300, 20), (1, 2), heads=71, kv_heads=1),
    # Heads whose last eight columns are half of the widest vector.
    Case("heads of 72", (300, 70), (1, 40), head_dim=72),
    Case(
        "heads of 24, blocks of 8", (300, 70), (1, 40), head_dim=24, block_size=8, kv_cache_dtype=torch.int8
    ),
    *(
        Case(f"long, {dtype}", (700, 520), (100, 1), head_dim=80, window=333, kv_cache_dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    ),
]


@pytest.fixture(autouse=True)
def of_each_build(build: CpuLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every build that this machine can run, in turn, is the one that `CpuAttention` finds."""
    monkeypatch.setattr(cpu, "load_library", lambda: build)


@pytest.mark.parametrize("case", [*parity.cases(), *_LONG], ids=str)
def test_equals_the_definition(case: Case) -> None:
    parity.check(CpuAttention, case)


@pytest.mark.parametrize("property_check", parity.PROPERTIES, ids=lambda check: check.__name__)
def test_holds_what_every_backend_has_to(property_check) -> None:
    property_check(CpuAttention)


def test_neither_threads_nor_neighbours_change_a_bit() -> None:
    scene = Scene.of(Case("batch", (1200, 700, 33, 90), (1, 60, 1, 5), head_dim=64))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = scene.run(CpuAttention)
        torch.set_num_threads(3)
        together = scene.run(CpuAttention)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, together)

    case = Case("first alone", (1200,), (1,), head_dim=64)
    first = Scene(
        case, scene.tables[:1], scene.num_blocks, scene.keys[:1], scene.values[:1], scene.q[:1], "cpu"
    )
    assert torch.equal(first.run(CpuAttention), alone[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_views_of_packed_projections_equal_tensors_of_their_own(dtype: torch.dtype) -> None:
    scene = Scene.of(Case("views", (40, 7), (19, 7), dtype=dtype, kv_cache_dtype=dtype))
    expected = scene.run(CpuAttention)
    qkv = torch.cat([scene.q, scene.new(scene.keys), scene.new(scene.values)], dim=1)
    views = qkv.split([6, 2, 2], dim=1)
    transposed = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in views]
    for q, k, v in (views, transposed):
        backend = scene.backend(CpuAttention)
        scene.fill(backend)
        assert torch.equal(backend.attend(scene.metadata(), 1, q, k, v), expected)


def test_the_null_block_is_zero_and_no_copy_may_target_it() -> None:
    attention = _build()
    assert all(not tensor[0].any() for cache in attention.caches for tensor in cache.tensors())
    with pytest.raises(ValueError, match="null block"):
        attention.copy_blocks([(1, 0)])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_size": 12}, "block size 12"),
        ({"dtype": torch.float64}, "float64"),
        ({"dtype": torch.int8}, "int8"),
        ({"dtype": torch.float8_e4m3fn}, "float8"),
        ({"kv_cache_dtype": torch.float64}, "float64"),
        ({"device": "meta"}, "meta"),
        ({"layers": [AttentionLayer(6, 2, 20, 1.0, None, None)]}, "layer 0"),
        ({"layers": [_PLAIN, AttentionLayer(5, 2, 16, 1.0, None, None)]}, "layer 1"),
    ],
)
def test_refuses_what_it_has_no_kernel_for(changed: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _build(**changed)


def test_refuses_tensors_of_another_shape_or_dtype() -> None:
    scene = Scene.of(Case("wrong", (9,), (4,)))
    attention = scene.backend(CpuAttention)
    q, k, v = scene.q, scene.new(scene.keys), scene.new(scene.values)
    for wrong in ((q[:3], k, v), (q, k[:, :1], v), (q, k, v.half()), (q[..., :8], k, v)):
        with pytest.raises(ValueError, match="expected"):
            attention.attend(scene.metadata(), 0, *wrong)


def test_without_a_library_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load_library", lambda: "it is not there")
    with pytest.raises(UsageError, match="it is not there"):
        _build()


def _build(**changed) -> CpuAttention:
    arguments = {
        "layers": [_PLAIN],
        "num_blocks": 4,
        "block_size": 16,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "device": "cpu",
    } | changed
    return CpuAttention(arguments.pop("layers"), **arguments)
