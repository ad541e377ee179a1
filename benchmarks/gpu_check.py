"""Everything that only a CUDA device can tell about the kernels: `make gpu-check`.

Compiles them, holds them to the parity suite on the device, and the engine's captured decode steps to those
that are not; runs compute-sanitizer over a few cases if it is there; measures decode and chunked prefill as
shares of what the device reaches in the same run: bandwidth of a device-to-device copy, rate of a large
matrix product; then steps of the engine. Two tables, and one JSON file. A machine without CUDA gets one line
and exit code 1.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.unit.kernels import parity

from benchmarks import gpu_engine
from benchmarks.gpu_steps import BLOCK_SIZE, Step, gather_and_attend, installed, make_step
from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import TesseraError
from tessera_cli.kernels.cuda import CudaAttention, find_obstacle

DECODE_BATCHES = (1, 8, 64, 256)
DECODE_CONTEXTS = (512, 4096, 32768)
PREFILL_CHUNKS = ((2048, 0), (2048, 14336))  # new tokens, cached tokens
HEADS = {"SmolLM2-135M 9/3 x 64": (9, 3, 64), "Llama-3-8B 32/8 x 128": (32, 8, 128)}
REPEATS = 20
MEMORY_SHARE = 0.6  # of the free device memory, for one KV cache beside the gathered copy of SDPA
SANITIZED_CASES = 12


@dataclass(frozen=True)
class Measurement:
    """One step of one layer.

    Attributes:
        heads: of the model that it is like.
        step: batch and context, or chunk and history.
        kv_cache_dtype: that keys and values are stored in.
        implementation: what ran.
        milliseconds: the median of `REPEATS` runs.
        bandwidth_share: bytes of the visible KV cache over time, of the measured copy bandwidth.
        matmul_share: operations over time, of the measured matrix product.
    """

    heads: str
    step: str
    kv_cache_dtype: str
    implementation: str
    milliseconds: float
    bandwidth_share: float
    matmul_share: float


def main() -> int:
    """Run all checks; 0 if every result is right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-check.json"), help="the JSON file")
    parser.add_argument("--parity-only", action="store_true", help="no measurements")
    parser.add_argument(
        "--few", action="store_true", help=f"only {SANITIZED_CASES} cases of the parity suite"
    )
    options = parser.parse_args()
    obstacle = find_obstacle()
    if obstacle is not None:
        print(f"gpu-check cannot run: {obstacle}", file=sys.stderr)
        return 1
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, sm_{properties.major}{properties.minor}, torch {torch.__version__}")
    failures = check_parity(few=options.few)
    if options.parity_only:
        return bool(failures)
    failures += gpu_engine.check_tokens(gpu_engine.SMOLLM2, "cuda")
    sanitizer = check_with_sanitizer()
    copy, product = measure_copy(), measure_product()
    print(f"copy {copy / 1e9:.0f} GB/s, bfloat16 matrix product {product / 1e12:.0f} TFLOP/s")
    measurements = [*measure_all(copy, product)]
    print_table(measurements)
    steps = gpu_engine.measure_models("cuda", failures)
    gpu_engine.print_table(steps)
    options.output.write_text(
        json.dumps(
            {
                "device": properties.name,
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "failures": failures,
                "sanitizer": sanitizer,
                "copy_bytes_per_second": copy,
                "product_operations_per_second": product,
                "measurements": [asdict(measurement) for measurement in measurements],
                "engine_steps": [asdict(step) for step in steps],
            },
            indent=2,
        )
        + "\n"
    )
    print(f"written to {options.output}")
    return bool(failures)


def check_parity(*, few: bool) -> list[str]:
    """The shared parity suite on the device; the names of what fails."""
    checks: list[tuple[str, Callable[[], None]]] = [
        (str(case), lambda case=case: parity.check(CudaAttention, case, device="cuda"))
        for case in parity.cases()
    ]
    checks += [
        (holds.__name__, lambda holds=holds: holds(CudaAttention, "cuda")) for holds in parity.PROPERTIES
    ]
    if few:
        checks = checks[:: len(checks) // SANITIZED_CASES]
    failures = []
    for name, check in checks:
        try:
            check()
        except (AssertionError, TesseraError) as error:
            failures.append(name)
            print(f"FAILED {name}: {str(error).splitlines()[0]}")
    print(f"parity: {len(checks) - len(failures)} of {len(checks)} cases right")
    return failures


def check_with_sanitizer() -> dict[str, str]:
    """compute-sanitizer's verdict by tool; empty where it is not installed."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        print("compute-sanitizer: not installed")
        return {}
    verdicts = {}
    for tool in ("memcheck", "racecheck", "synccheck", "initcheck"):
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
        run = subprocess.run([*command, "--parity-only", "--few"], capture_output=True, text=True)
        verdicts[tool] = "clean" if run.returncode == 0 else run.stdout.strip().splitlines()[-1]
        print(f"compute-sanitizer {tool}: {verdicts[tool]}")
    return verdicts


def measure_copy() -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


def measure_product() -> float:
    """Operations a second of an 8192 x 8192 x 8192 product in bfloat16."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * 8192**3 / seconds_of(lambda: a @ a)


def seconds_of(function: Callable[[], Any]) -> float:
    """The median time of a call, by events, after three unmeasured ones."""
    for _ in range(3):
        function()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure_all(copy: float, product: float) -> Iterator[Measurement]:
    """Every step that the device has memory for, by every implementation that is installed."""
    for heads, (num_heads, num_kv_heads, head_dim) in HEADS.items():
        layer = AttentionLayer(num_heads, num_kv_heads, head_dim, head_dim**-0.5, None, None)
        steps = [
            (f"decode {batch} x {context}", [1] * batch, [context] * batch)
            for batch in DECODE_BATCHES
            for context in DECODE_CONTEXTS
        ]
        steps += [(f"prefill {new} after {old}", [new], [old + new]) for new, old in PREFILL_CHUNKS]
        for name, queries, lengths in steps:
            token_bytes = 2 * num_kv_heads * head_dim * 2
            if sum(lengths) * token_bytes * 2 > MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
                print(f"left out for want of memory: {heads}, {name}")
                continue
            step = make_step(layer, queries, lengths)
            for stored in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
                for implementation, function in implementations(step, stored):
                    seconds = seconds_of(function)
                    kv_bytes = step.kv_elements * stored.itemsize
                    yield Measurement(
                        heads,
                        name,
                        str(stored).removeprefix("torch."),
                        implementation,
                        seconds * 1e3,
                        kv_bytes / seconds / copy,
                        step.operations / seconds / product,
                    )
            del step
            torch.cuda.empty_cache()


def implementations(step: Step, stored: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What can run the step, named; all but `tessera` read a bfloat16 cache only."""
    backend = CudaAttention(
        [step.layer],
        num_blocks=step.num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        kv_cache_dtype=stored,
        device="cuda",
    )
    for cache in (backend.key_caches[0], backend.value_caches[0]):
        if cache.scales is not None:
            cache.elements.random_(-127, 128)
            cache.scales.fill_(0.01)
        elif stored == torch.float8_e4m3fn:
            cache.elements.view(torch.uint8).random_(0, 0x60)  # positive numbers below 32
        else:
            cache.elements.normal_()
    yield "tessera", lambda: backend.attend(step.metadata, 0, step.q, step.k, step.v)
    yield (
        "tessera, in a CUDA graph",
        capture(lambda: backend.attend(step.metadata, 0, step.q, step.k, step.v)),
    )
    if stored == torch.bfloat16:
        keys, values = backend.key_caches[0].elements, backend.value_caches[0].elements
        yield "gather + SDPA", lambda: gather_and_attend(step, keys, values)
        yield from installed(step, keys, values)


def capture(function: Callable[[], Any]) -> Callable[[], None]:
    """`function` as a replayed CUDA graph."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def print_table(measurements: list[Measurement]) -> None:
    """One line a measurement."""
    row = "{:24} {:26} {:9} {:26} {:>10} {:>10} {:>10}"
    print(row.format("heads", "step", "cache", "implementation", "ms", "of copy", "of matmul"))
    for m in measurements:
        figures = f"{m.milliseconds:.3f}", f"{m.bandwidth_share:.0%}", f"{m.matmul_share:.0%}"
        print(row.format(m.heads, m.step, m.kv_cache_dtype, m.implementation, *figures))


if __name__ == "__main__":
    sys.exit(main())
