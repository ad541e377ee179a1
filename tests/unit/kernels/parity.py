"""What every paged-attention backend is held to: cases against the definition, and properties.

A backend's tests run `check(factory, case)` over `cases()`, and each of `PROPERTIES` with the factory, which
is called like `ReferenceAttention`. Caches are filled through `attend` alone: a layout is the backend's own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.kernels.backend import AttentionBackend, AttentionMetadata
from tessera_cli.kernels.kv_cache import quantise, to_fp8

Factory = Callable[..., AttentionBackend]
# ||out - expected|| / ||expected||, the definition being given the stored values; the coarsest dtype counts.
TOLERANCES = {
    torch.float32: 1e-5,
    torch.float8_e4m3fn: 1e-5,  # whose numbers every dtype of queries has exactly
    torch.int8: 5e-3,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}
STORED_DTYPES = tuple(TOLERANCES)


@dataclass(frozen=True)
class Case:
    """A step over sequences with a history; of `lengths` tokens the last `queries` are new.

    `shared` blocks at the start of every sequence are one and the same; `spare` blocks belong to nobody.
    """

    name: str
    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    scale: float | None = None
    shared: int = 0
    spare: int = 3
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return self.name

    @property
    def layer(self) -> AttentionLayer:
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return AttentionLayer(self.heads, self.kv_heads, self.head_dim, scale, self.window, self.soft_cap)

    @property
    def tolerance(self) -> float:
        return max(TOLERANCES[self.dtype], TOLERANCES[self.kv_cache_dtype])


@dataclass(eq=False)
class Scene:
    """A case as tensors: `keys` and `values` [length, kv_heads, head_dim] of each sequence, new ones last."""

    case: Case
    tables: list[list[int]]
    num_blocks: int
    keys: list[Tensor]
    values: list[Tensor]
    q: Tensor
    device: torch.device | str = "cpu"

    @classmethod
    def of(cls, case: Case, *, device: torch.device | str = "cpu", seed: int = 0) -> "Scene":
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype)

        counts = [max(-(-length // case.block_size) - case.shared, 0) for length in case.lengths]
        num_blocks = 1 + case.shared + sum(counts) + case.spare
        free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        prefix = [free.pop() for _ in range(case.shared)]
        tables = [prefix + [free.pop() for _ in range(count)] for count in counts]
        shape = (case.kv_heads, case.head_dim)
        keys, values = ([randn(length, *shape) for length in case.lengths] for _ in range(2))
        num_shared = case.shared * case.block_size
        for histories in (keys, values):
            for history in histories[1:]:
                history[:num_shared] = histories[0][:num_shared]
        return cls(
            case,
            tables,
            num_blocks,
            keys,
            values,
            randn(sum(case.queries), case.heads, case.head_dim),
            device,
        )

    def slot(self, sequence: int, position: int) -> int:
        block_size = self.case.block_size
        return self.tables[sequence][position // block_size] * block_size + position % block_size

    def new(self, histories: list[Tensor]) -> Tensor:
        """The new tokens' part of `keys` or `values`, packed."""
        parts = zip(histories, self.case.queries, strict=True)
        return torch.cat([history[len(history) - query :] for history, query in parts]).to(self.device)

    def metadata(self) -> AttentionMetadata:
        lengths, queries = self.case.lengths, self.case.queries
        slots = [
            self.slot(sequence, position)
            for sequence, (length, query) in enumerate(zip(lengths, queries, strict=True))
            for position in range(length - query, length)
        ]
        return _metadata(queries, lengths, self.tables, slots, self.device)

    def backend(self, factory: Factory, *, num_layers: int = 2) -> AttentionBackend:
        """An empty cache for `num_layers` layers of the case."""
        return factory(
            [self.case.layer] * num_layers,
            num_blocks=self.num_blocks,
            block_size=self.case.block_size,
            dtype=self.case.dtype,
            kv_cache_dtype=self.case.kv_cache_dtype,
            device=self.device,
        )

    def write(self, backend: AttentionBackend, slots: list[int], k: Tensor, v: Tensor, layer: int) -> None:
        """Store rows in `slots`, as one sequence each; what comes out is dropped."""
        tables = [[slot // self.case.block_size] for slot in slots]
        q = torch.zeros(len(slots), *self.q.shape[1:], dtype=self.case.dtype, device=self.device)
        ones = [1] * len(slots)
        metadata = _metadata(ones, ones, tables, slots, self.device)
        backend.attend(metadata, layer, q, k.to(self.device), v.to(self.device))

    def poison(self, backend: AttentionBackend, layer: int = 1) -> None:
        """Put into every slot, the null block's too, what would ruin any result that it reaches."""
        slots = list(range(self.num_blocks * self.case.block_size))
        # A kernel may turn NaN into a number when it quantises; what is huge stays huge.
        value = 6e4 if self.case.kv_cache_dtype == torch.int8 else torch.nan
        rows = torch.full((len(slots), self.case.kv_heads, self.case.head_dim), value, dtype=self.case.dtype)
        self.write(backend, slots, rows, rows, layer)

    def fill(self, backend: AttentionBackend, layer: int = 1) -> None:
        """The histories in their slots; a shared block is written once for each sequence that has it."""
        for sequence, (length, query) in enumerate(zip(self.case.lengths, self.case.queries, strict=True)):
            if length > query:
                slots = [self.slot(sequence, position) for position in range(length - query)]
                keys, values = self.keys[sequence][: length - query], self.values[sequence][: length - query]
                self.write(backend, slots, keys, values, layer)

    def attend(self, backend: AttentionBackend, layer: int = 1) -> Tensor:
        """The step itself; memory that the backend allocates and does not write shows as NaN."""
        with _unwritten_memory_is_nan():
            q, k, v = self.q.to(self.device), self.new(self.keys), self.new(self.values)
            return backend.attend(self.metadata(), layer, q, k, v).cpu()

    def run(self, factory: Factory) -> Tensor:
        """Poison, histories, step."""
        backend = self.backend(factory)
        self.poison(backend)
        self.fill(backend)
        return self.attend(backend)

    def expected(self) -> Tensor:
        """The definition of attention over the stored values, in float64."""
        layer, rows = self.case.layer, []
        keys, values = ([_stored(h, self.case.kv_cache_dtype) for h in hs] for hs in (self.keys, self.values))
        start = 0
        for sequence, (length, query) in enumerate(zip(self.case.lengths, self.case.queries, strict=True)):
            q = self.q[start : start + query].double()
            group = layer.num_heads // layer.num_kv_heads
            k, v = (tensor[sequence].repeat_interleave(group, dim=1) for tensor in (keys, values))
            scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
            if layer.logits_soft_cap is not None:
                scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
            i, j = torch.arange(length - query, length)[:, None], torch.arange(length)
            seen = j <= i
            if layer.sliding_window is not None:
                seen &= j >= i - layer.sliding_window + 1
            rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
            start += query
        return torch.cat(rows)


def check(factory: Factory, case: Case, *, device: torch.device | str = "cpu") -> None:
    """The case's result equals the definition; what unused slots and the null block hold never shows."""
    scene = Scene.of(case, device=device)
    out = scene.run(factory)
    assert out.shape == scene.q.shape
    assert out.dtype == case.dtype
    assert bool(out.isfinite().all()), f"{case}: rows that are not finite"
    expected = scene.expected()
    if expected.numel():
        error = float((out.double() - expected).norm() / expected.norm())
        assert error <= case.tolerance, f"{case}: relative error {error:.2e} above {case.tolerance:.0e}"


def check_every_code_of_float8_is_what_it_says(factory: Factory, device: torch.device | str = "cpu") -> None:
    """All 256 codes of float8 e4m3 are read as torch reads them, and numbers rounded as it rounds them.

    A sequence of one token gives its value back, whatever its score is.
    """
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = codes[codes.isfinite()].sort().values
    ties = (numbers[1:] + numbers[:-1]) / 2
    up, down = (ties.nextafter(torch.tensor(end)) for end in (torch.inf, -torch.inf))
    limits = torch.tensor([464.0, 464.00003, 480, 1e38, torch.inf])
    tiny = torch.tensor([1e-45, 1e-38, 2**-10])
    every = torch.cat([codes, ties, up, down, limits, -limits, tiny, -tiny])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        # A head has sixteen of them, one after the other, and the next head the same backwards.
        rows = torch.cat([every, every[: -len(every) % 16]]).to(dtype).view(-1, 1, 16)
        rows = torch.cat([rows, rows.flip(-1)], dim=1)
        ones = (1,) * len(rows)
        case = Case("codes", ones, ones, block_size=8, dtype=dtype, kv_cache_dtype=torch.float8_e4m3fn)
        scene = Scene.of(case, device=device)
        scene.values = list(rows[:, None])
        expected = to_fp8(rows).to(dtype).repeat_interleave(3, dim=1)
        torch.testing.assert_close(scene.run(factory), expected, atol=0, rtol=0, equal_nan=True)


def check_later_tokens_do_not_reach_earlier_ones(
    factory: Factory, device: torch.device | str = "cpu"
) -> None:
    """Changing the last token's key and value changes its own row only."""
    scene = Scene.of(Case("future", (37, 20), (19, 20)), device=device)
    before = scene.run(factory)
    for histories in (scene.keys, scene.values):
        histories[0][-1] += 3
    after = scene.run(factory)
    changed = (before != after).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [18]


def check_a_neighbour_changes_no_bit(factory: Factory, device: torch.device | str = "cpu") -> None:
    """What another sequence holds, NaN included, never shows in a row."""
    scene = Scene.of(Case("neighbours", (33, 50, 9, 21), (1, 1, 4, 1)), device=device)
    before = scene.run(factory)
    for histories in (scene.keys, scene.values):
        histories[1][:] = torch.nan
        histories[2][:] *= 7
    after = scene.run(factory)
    kept = [0, 6]  # of the packed rows 0 | 1 | 2 3 4 5 | 6
    assert torch.equal(before[kept], after[kept])
    assert bool(after[1].isnan().all())


def check_a_value_that_is_not_finite_is_not_hidden(
    factory: Factory, device: torch.device | str = "cpu"
) -> None:
    """A NaN or an infinity among a sequence's keys or values makes its row NaN or infinite in every dtype."""
    beyond = 465.0  # what is stored in float8 e4m3
    for dtype in STORED_DTYPES:
        for value in (torch.nan, torch.inf, *([beyond] if dtype == torch.float8_e4m3fn else [])):
            scene = Scene.of(Case("not finite", (9, 9), (1, 1), kv_cache_dtype=dtype), device=device)
            scene.keys[0][4, 0, 3] = value
            scene.values[1][4, 0, 3] = value
            out = scene.run(factory)
            for row in out:
                assert not bool(row[:3].isfinite().all()), f"{value} is hidden by {dtype}"


def check_slot_minus_one_is_not_written(factory: Factory, device: torch.device | str = "cpu") -> None:
    """A skipped token leaves every slot as it was, the last one included, which an index of -1 would hit."""
    scene = Scene.of(Case("skipped", (32,), (1,), spare=0, block_size=8), device=device)
    backend = scene.backend(factory)
    scene.fill(backend)
    clean = scene.attend(backend)
    metadata = scene.metadata()
    metadata.slot_mapping[:] = -1
    junk = torch.full_like(scene.new(scene.keys), 100.0)
    q = scene.q.to(device)
    skipped = backend.attend(metadata, 1, q, junk, junk).cpu()
    assert torch.equal(skipped, clean)


def check_layers_have_caches_of_their_own(factory: Factory, device: torch.device | str = "cpu") -> None:
    """Layers may differ in heads, windows and caps, and never read each other's blocks."""
    wide = Case("wide", (21,), (1,), heads=8, kv_heads=4, head_dim=32)
    narrow = Case("narrow", (21,), (1,), window=5, soft_cap=2.0)
    scenes = [Scene.of(case, device=device) for case in (wide, narrow, wide)]
    backend = factory(
        [scene.case.layer for scene in scenes],
        num_blocks=scenes[0].num_blocks,
        block_size=16,
        dtype=torch.float32,
        kv_cache_dtype=torch.float32,
        device=device,
    )
    for layer, scene in enumerate(scenes):
        scene.poison(backend, layer)
        scene.fill(backend, layer)
    for layer, scene in enumerate(scenes):
        out, expected = scene.attend(backend, layer), scene.expected()
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-4)


def check_copied_blocks_equal_their_sources(
    factory: Factory, device: torch.device | str = "cpu", dtypes: Sequence[torch.dtype] = STORED_DTYPES
) -> None:
    """A table of copies gives the bits of the originals, in all layers and dtypes; sources are read first."""
    for dtype in dtypes:
        scene = Scene.of(Case("copies", (40,), (1,), kv_cache_dtype=dtype, spare=3), device=device)
        backend = scene.backend(factory)
        for layer in range(2):
            scene.poison(backend, layer)
            scene.fill(backend, layer)
        clean = [scene.attend(backend, layer) for layer in range(2)]
        backend.copy_blocks([])
        (table,) = scene.tables
        spare = sorted(set(range(1, scene.num_blocks)) - set(table))
        # The second pair overwrites the source of the first.
        backend.copy_blocks([(table[0], spare[0]), (table[1], table[0]), (table[2], spare[1])])
        scene.tables = [[spare[0], table[0], spare[1]]]
        assert all(torch.equal(scene.attend(backend, layer), clean[layer]) for layer in range(2))


def check_chunks_equal_the_whole(factory: Factory, device: torch.device | str = "cpu") -> None:
    """A prompt in pieces of any size gives what it gives at once."""
    for window in (None, 7):
        whole = Scene.of(Case("whole", (35,), (35,), window=window), device=device)
        expected = whole.run(factory).double()
        for size in (1, 3, 16, 34):
            backend = whole.backend(factory)
            rows = []
            for start in range(0, 35, size):
                end = min(start + size, 35)
                piece = Case("piece", (end,), (end - start,), window=window)
                keys, values = [whole.keys[0][:end]], [whole.values[0][:end]]
                scene = Scene(piece, whole.tables, whole.num_blocks, keys, values, whole.q[start:end], device)
                rows.append(scene.attend(backend))
            torch.testing.assert_close(torch.cat(rows).double(), expected, atol=1e-5, rtol=1e-4)


PROPERTIES = (
    check_later_tokens_do_not_reach_earlier_ones,
    check_a_neighbour_changes_no_bit,
    check_a_value_that_is_not_finite_is_not_hidden,
    check_slot_minus_one_is_not_written,
    check_layers_have_caches_of_their_own,
    check_copied_blocks_equal_their_sources,
    check_every_code_of_float8_is_what_it_says,
    check_chunks_equal_the_whole,
)


def cases() -> Iterator[Case]:
    """Every case, names all different; a backend that lacks a size filters by the attributes."""
    ragged = ((70, 3, 33, 1, 17, 128), (1, 1, 5, 1, 17, 1))
    yield Case("ragged", *ragged)
    yield Case("decodes of very different lengths", (300, 3, 33, 1, 2, 16), (1,) * 6)
    yield Case("whole prompts", (7, 16, 33), (7, 16, 33))
    yield Case("chunks after a history", (19, 41, 16), (3, 25, 2))
    yield Case("sequences without a token", (0, 20, 9, 0, 5), (0, 1, 0, 0, 5))
    yield Case("one long sequence", (4096,), (1,))
    yield Case("the widest table beside the shortest", (2048, 1), (1, 1), block_size=8)
    yield Case("shared blocks", (40, 40, 55), (1, 3, 23), shared=2)
    yield Case("many sequences", tuple(range(1, 71)), (1,) * 70)
    for query in range(1, 34):
        yield Case(f"{query} new tokens", (40 + query,), (query,))
    for length in range(1, 34):
        yield Case(f"decode at {length}", (length,), (1,))
    for group in range(1, 9):
        yield Case(f"group of {group}", *ragged, heads=2 * group, kv_heads=2)
    for kv_heads in (1, 3, 5):
        yield Case(f"{kv_heads} kv heads", *ragged, heads=3 * kv_heads, kv_heads=kv_heads)
    for block_size in (8, 16, 32, 64, 128):
        yield Case(f"blocks of {block_size}", *ragged, block_size=block_size)
    for head_dim in (8, 64, 80, 96, 128, 256):
        yield Case(f"heads of {head_dim}", *ragged, head_dim=head_dim)
    for window in (1, 3, 15, 16, 17, 40, 1000):
        yield Case(f"window of {window}", *ragged, window=window)
        yield Case(f"window of {window}, prompts", (50, 20), (33, 20), window=window)
    for soft_cap in (0.5, 30.0):
        yield Case(f"soft cap of {soft_cap}", *ragged, soft_cap=soft_cap, scale=1.0)
        yield Case(f"soft cap of {soft_cap}, window", *ragged, soft_cap=soft_cap, scale=1.0, window=9)
    yield Case("scale", *ragged, scale=0.7)
    for dtype, stored in _DTYPES:
        names = f"{dtype} over {stored}".replace("torch.", "")
        yield Case(names, *ragged, head_dim=64, dtype=dtype, kv_cache_dtype=stored)
        yield Case(
            f"{names}, window and cap", *ragged, window=20, soft_cap=5.0, dtype=dtype, kv_cache_dtype=stored
        )


_DTYPES = (
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.int8),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float16, torch.float16),
    (torch.float16, torch.int8),
    (torch.float16, torch.float8_e4m3fn),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
)


def _metadata(
    queries: "list[int] | tuple[int, ...]",
    lengths: "list[int] | tuple[int, ...]",
    tables: list[list[int]],
    slots: list[int],
    device: torch.device | str,
) -> AttentionMetadata:
    widest = max(map(len, tables))

    def int32(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return AttentionMetadata(
        query_start_loc=int32([0, *queries]).cumsum(0, dtype=torch.int32),
        seq_lens=int32(list(lengths)),
        block_tables=int32([table + [0] * (widest - len(table)) for table in tables]),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )


def _stored(history: Tensor, dtype: torch.dtype) -> Tensor:
    """`history` as a cache of `dtype` gives it back, in float64."""
    if dtype == torch.float8_e4m3fn:
        return to_fp8(history).double()
    if dtype != torch.int8:
        return history.to(dtype).double()
    steps, scales = quantise(history)
    return steps.double() * scales.double()[..., None]


@contextmanager
def _unwritten_memory_is_nan() -> Iterator[None]:
    """`torch.empty` and its like return NaN inside."""
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")
