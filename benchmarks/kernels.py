"""Compiled CPU kernels beside what they replace, as ratios of the lowest times of one run.

    python benchmarks/kernels.py [--threads 2] [--seconds 1.5]

Sizes are SmolLM2-135M's: 9 query heads and 3 key heads of 64, hidden size 576, inner size 1,536. The two
sides of a ratio are timed in turn, so that a machine that is busy for a while slows both. Caches are those of
several layers, as in a model: 100 MB or more, which a large last-level cache holds, and then serves to the
gather as well. What decoding can reach is a plain read of as many bytes by all threads: the last column.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.engine.truncation import truncate_rows_plainly
from tessera_cli.kernels.backend import AttentionMetadata
from tessera_cli.kernels.cpu import CpuAttention
from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
from tessera_cli.kernels.cpu_operators import CpuOperators
from tessera_cli.kernels.cpu_truncation import truncate_rows
from tessera_cli.kernels.reference import ReferenceAttention
from tessera_cli.models.layers import RMSNorm
from tessera_cli.models.operators import TorchOperators

_LAYER = AttentionLayer(
    num_heads=9, num_kv_heads=3, head_dim=64, scale=64**-0.5, sliding_window=None, logits_soft_cap=None
)
_BLOCK_SIZE = 16
_HIDDEN, _INNER, _VOCAB = 576, 1536, 49152
Run = Callable[[int], object]


def lowest(seconds: float, *runs: Run) -> list[float]:
    """Lowest time of each run, in seconds; each is called with a counter, all in turn.

    On one thread it is the thread's own time, which does not count what a busy machine takes away.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for run in runs:
        run(0), run(1)
    best = [float("inf")] * len(runs)
    end, index = time.perf_counter() + seconds * len(runs), 2
    while index < 5 or time.perf_counter() < end:
        for place, run in enumerate(runs):
            start = clock()
            run(index)
            best[place] = min(best[place], clock() - start)
        index += 1
    return best


class Step:
    """New tokens of `num_seqs` sequences of `length`, over shuffled blocks, in several layers."""

    def __init__(
        self, num_seqs: int, length: int, *, query: int = 1, dtype: torch.dtype = torch.float32
    ) -> None:
        width = -(-length // _BLOCK_SIZE)
        self.bytes = 2 * num_seqs * length * 3 * 64 * dtype.itemsize
        self.num_layers = max(2, min(12, round(100e6 / self.bytes)))
        self.num_blocks = 1 + num_seqs * width
        self.dtype = dtype
        tables = (torch.randperm(num_seqs * width) + 1).view(num_seqs, width)
        positions = torch.arange(length - query, length)
        self.metadata = AttentionMetadata(
            query_start_loc=torch.arange(0, num_seqs * query + 1, query, dtype=torch.int32),
            seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
            block_tables=tables.int(),
            slot_mapping=(
                tables[:, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
            ).flatten(),
            max_query_len=query,
            max_seq_len=length,
        )
        tokens = num_seqs * query
        self.q, self.k, self.v = torch.randn(tokens, 15, 64).split([9, 3, 3], dim=1)

    def run(self, backend: type[CpuAttention] | type[ReferenceAttention]) -> Run:
        attention = backend(
            [_LAYER] * self.num_layers,
            num_blocks=self.num_blocks,
            block_size=_BLOCK_SIZE,
            dtype=torch.float32,
            kv_cache_dtype=self.dtype,
            device="cpu",
        )
        tensors = (
            [tensor for cache in attention.caches for tensor in cache.tensors()]
            if isinstance(attention, CpuAttention)
            else [cache.elements for cache in (*attention.key_caches, *attention.value_caches)]
        )
        for tensor in tensors:
            tensor.copy_(
                torch.randn(1024)
                .to(self.dtype)
                .repeat(-(-tensor.numel() // 1024))[: tensor.numel()]
                .view_as(tensor)
            )
        return lambda index: attention.attend(self.metadata, index % self.num_layers, self.q, self.k, self.v)


def decode(seconds: float, library: CpuLibrary) -> None:
    for num_seqs, length, dtype, goal in (
        (64, 512, torch.float32, ">= 8"),
        (64, 512, torch.float16, ""),
        (64, 2048, torch.float32, ""),
        (16, 512, torch.float32, ""),
        (1, 4096, torch.float32, ">= 5"),
        (1, 4096, torch.float16, ""),
        (1, 512, torch.float32, ""),
    ):
        step = Step(num_seqs, length, dtype=dtype)
        ours, theirs, read = lowest(
            seconds, step.run(CpuAttention), step.run(ReferenceAttention), _plain_read(library, step)
        )
        name = f"decode {num_seqs} x {length}, {str(dtype)[6:]}"
        more = f"{step.bytes / ours / 1e9:.1f} GB/s, {read / ours:.2f} of a plain read"
        tell(f"{name}: over gather and SDPA", theirs / ours, ours, goal, more)


def _flat(library: CpuLibrary, size: int) -> Tensor:
    """`size` bytes of float32 on pages of the same kind as the caches'."""
    flat = torch.empty(size // 4)
    library.functions.tessera_advise_huge_pages(flat.data_ptr(), size)
    return flat.copy_(torch.randn(1024).repeat(size // 4096))


def _plain_read(library: CpuLibrary, step: Step) -> Run:
    flat = [_flat(library, step.bytes) for _ in range(step.num_layers)]
    return lambda index: flat[index % len(flat)].sum()


def _read_blocks(library: CpuLibrary, step: Step) -> Run:
    """The same bytes by pieces of a block and head, scattered as a pool's are, by torch's embedding_bag."""
    pieces = [_flat(library, step.bytes).view(-1, _BLOCK_SIZE * 64) for _ in range(step.num_layers)]
    order = torch.randperm(len(pieces[0]))
    bags = torch.arange(0, len(order), 64)
    return lambda index: F.embedding_bag(order, pieces[index % len(pieces)], bags, mode="sum")


def bandwidth(seconds: float, library: CpuLibrary) -> None:
    step = Step(64, 2048)
    goals = {torch.float16: ">= 1.6", torch.bfloat16: "", torch.int8: "", torch.float8_e4m3fn: ""}
    smaller = [Step(64, 2048, dtype=dtype).run(CpuAttention) for dtype in goals]
    reads = _plain_read(library, step), _read_blocks(library, step)
    ours, read, scattered, *others = lowest(seconds, step.run(CpuAttention), *reads, *smaller)
    tell(
        "decode 64 x 2048, float32: of a plain read",
        read / ours,
        ours,
        ">= 0.8",
        f"read {step.bytes / read / 1e9:.1f} GB/s",
    )
    tell("decode 64 x 2048, float32: of a read of scattered blocks", scattered / ours, ours)
    for (dtype, goal), other in zip(goals.items(), others, strict=True):
        tell(f"decode 64 x 2048: {str(dtype)[6:]} over float32", ours / other, other, goal)


def prefill(seconds: float) -> None:
    for new, cached, goal in ((512, 1536, ">= 1.0"), (512, 0, ""), (5, 2043, "")):
        step = Step(1, new + cached, query=new)
        q = step.q.transpose(0, 1)[None].contiguous()
        k, v = (torch.randn(1, 3, new + cached, 64) for _ in range(2))
        mask = torch.arange(new + cached) <= torch.arange(cached, new + cached)[:, None]

        def contiguous(index: int, q=q, k=k, v=v, mask=mask, causal=cached == 0) -> Tensor:
            if causal:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        ours, theirs = lowest(seconds, step.run(CpuAttention), contiguous)
        tell(f"prefill {new} after {cached}: over SDPA on contiguous tensors", theirs / ours, ours, goal)


def operators(seconds: float, library: CpuLibrary) -> None:
    compiled = CpuOperators(library)
    for tokens in (1, 64, 512):
        for name, ours, theirs in _operator_pairs(compiled, tokens):
            best, plain = lowest(seconds / 4, ours, theirs)
            tell(f"{name}, {tokens} tokens: over torch", plain / best, best)


def _operator_pairs(compiled: CpuOperators, tokens: int) -> Sequence[tuple[str, Run, Run]]:
    residual = torch.randn(tokens, _HIDDEN)
    norm = RMSNorm(_HIDDEN, 1e-5, dtype=torch.float32, device="cpu").requires_grad_(False)
    zero = torch.zeros_like(residual)  # added again and again, it leaves the residual as it is
    gate_up, packed = torch.randn(tokens, 2 * _INNER), torch.randn(tokens, 15, 64)
    table = torch.ones(tokens, 1, 64), torch.zeros(tokens, 1, 64)
    plain = TorchOperators()
    return (
        (
            "add and norm",
            lambda _: compiled.add_rms_norm(zero, residual, norm),
            lambda _: plain.add_rms_norm(zero, residual, norm),
        ),
        (
            "rotate",
            lambda _: compiled.rotate(packed[:, :12], table),
            lambda _: plain.rotate(packed[:, :12], table),
        ),
        (
            "silu and mul",
            lambda _: compiled.silu_and_mul(gate_up),
            lambda _: plain.silu_and_mul(gate_up),
        ),
    )


def truncation(seconds: float, library: CpuLibrary) -> None:
    for num_rows, spread, top_p in ((1, 3.0, 0.95), (64, 3.0, 0.95), (64, 1.0, 0.95)):
        logits = torch.randn(num_rows, _VOCAB) * spread
        weights = (logits - logits.amax(dim=-1, keepdim=True)).exp()
        rows, top_k = torch.arange(num_rows), torch.full((num_rows,), _VOCAB)
        shares = torch.full((num_rows,), top_p, dtype=torch.float64)

        def compiled(_: int, weights=weights, rows=rows, top_k=top_k, shares=shares) -> None:
            truncate_rows(library, weights.clone(), rows, top_k, shares)

        def plain(_: int, weights=weights, rows=rows, top_k=top_k, shares=shares) -> None:
            truncate_rows_plainly(weights.clone(), rows.tolist(), top_k, shares)

        ours, theirs = lowest(seconds / 2, compiled, plain)
        tell(f"top-p {top_p} of {num_rows} rows, deviation {spread}: over torch", theirs / ours, ours)


def tell(name: str, ratio: float, seconds: float, goal: str = "", more: str = "") -> None:
    print(f"{name:64} {ratio:6.2f}  {goal:7} {seconds * 1e3:9.3f} ms  {more}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="for each side of a ratio")
    parser.add_argument(
        "only", nargs="*", help="decode, bandwidth, prefill, operators, truncation; all by default"
    )
    arguments = parser.parse_args()
    library = load_library()
    if not isinstance(library, CpuLibrary):
        raise SystemExit(f"no compiled kernels: {library}")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"{library.build}, {arguments.threads} threads; ratio, goal, our lowest time")
    parts = {
        "decode": lambda: decode(arguments.seconds, library),
        "bandwidth": lambda: bandwidth(arguments.seconds, library),
        "prefill": lambda: prefill(arguments.seconds),
        "operators": lambda: operators(arguments.seconds, library),
        "truncation": lambda: truncation(arguments.seconds, library),
    }
    with torch.inference_mode():
        for name in arguments.only or parts:
            parts[name]()


if __name__ == "__main__":
    main()
