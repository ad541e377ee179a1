"""What the CPU runs of the CUDA kernels notice: barriers taken out in turn, and other planted faults.

Takes minutes, so pytest collects it only when it is named: `make shim-sanitizers`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_shim.build import COMPILER, SHIM, build, sources

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="the kernels' source needs g++ to run on the CPU"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

# The instances of tests/cuda_shim/exercise.py.
NAMES = [
    "attend_tensor_core<__half, __half, 16, 1>",
    "attend_tensor_core<__half, __half, 16, 4>",
    "attend_tensor_core<__half, int8, 16, 1>",
    "attend_tensor_core<__half, int8, 16, 4>",
    "attend_tensor_core<__half, fp8, 16, 1>",
    "attend_tensor_core<__half, fp8, 16, 4>",
    "attend_plain<float, float, 16>",
    *(f"merge_splits<{query}, 16>" for query in ("__half", "float")),
    *(f"write_kv<{pair}, 16>" for pair in ("__half, __half", "__half, int8", "__half, fp8", "float, float")),
    "copy_blocks",
]
SANITIZERS = {"thread": "libtsan.so", "address": "libasan.so"}
REPORTS = {"thread": "WARNING: ThreadSanitizer", "address": "ERROR: AddressSanitizer"}


def barriers() -> list[tuple[str, int]]:
    """Every barrier of the source: file and index of the line."""
    return [
        (name, number)
        for name, text in sorted(sources().items())
        for number, line in enumerate(text.splitlines())
        if line.strip().startswith("__syncthreads()")
    ]


FAULTS = {
    "a barrier for some": (
        "attend_plain.cuh",
        "__syncthreads();\n    float dot",
        "if (warp == 0) __syncthreads();\n    float dot",
    ),
    "no wait for a copy": ("paged_attention.cu", "    copy_async_wait();\n", ""),
    "one key too many": (
        "attention_tile.cuh",
        "min(row_position(a, t, last_row) + 1,",
        "min(row_position(a, t, last_row) + 2,",
    ),
    "the table of the next": (
        "attention_tile.cuh",
        "(t.sequence) * a.max_blocks",
        "(t.sequence + 1) * a.max_blocks",
    ),
    "keys that nobody sees are read": (
        "attention_tile.cuh",
        "if (position < t.begin || position >= t.end) return -1;",
        "",
    ),
    "a tile too short": (
        "paged_attention.cu",
        "TILE = 2 * S::KEYS * S::PITCH",
        "TILE = (2 * S::KEYS - 1) * S::PITCH",
    ),
    "a stage too early": (
        "paged_attention.cu",
        "attention.copy_keys(slots[1 - stage], 1 - stage)",
        "attention.copy_keys(slots[1 - stage], stage)",
    ),
    "no rescaling": ("paged_attention.cu", "values[d][half * 2] *= keep;", ""),
    "the wrong rows of a matrix": (
        "paged_attention.cu",
        "lane / 16 * 8 + lane % 8) * S::PITCH",
        "lane / 16 * 8 + lane / 8) * S::PITCH",
    ),
    "the bytes of a pair swapped": ("float8.cuh", "(pair >> 8)}", "(pair)}"),
    "empty splits are read": ("merge_splits.cuh", "if (parts[split].y == 0.f) continue;", ""),
    "splits weigh the same": (
        "merge_splits.cuh",
        "exp2f(parts[split].x - total.base());",
        "1.f;",
    ),
    "a window one token wider": ("attention_tile.cuh", "position - a.window + 1", "position - a.window"),
    "the heads of a group change places": (
        "attention_tile.cuh",
        "a.group +\n         row % a.group;",
        "a.group +\n         (row + 1) % a.group;",
    ),
    "half a block is copied": ("kv_cache.cuh", "i < bytes / 16;", "i < bytes / 32;"),
    "skipped slots are written": ("kv_cache.cuh", "if (slot < 0) return;", "if (slot < -1) return;"),
}


def exercise(directory: Path, files: dict[str, str], sanitizer: str | None, *options: str) -> str:
    """What a run of tests/cuda_shim/exercise.py has to say against `files`; empty if nothing."""
    flags = ["-g", f"-fsanitize={sanitizer}"] if sanitizer else []
    library = build(NAMES, directory, flags=flags, files=files)
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(SHIM.parents[1]))
    if sanitizer:
        runtime = subprocess.run(
            [str(COMPILER), f"-print-file-name={SANITIZERS[sanitizer]}"],
            capture_output=True,
            text=True,
            check=True,
        )
        environment |= {
            "LD_PRELOAD": runtime.stdout.strip(),
            "TSAN_OPTIONS": "halt_on_error=1",
            "ASAN_OPTIONS": "detect_leaks=0",
        }
    command = [sys.executable, "-m", "tests.cuda_shim.exercise", str(library), *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=SHIM.parents[1])
    return "" if run.returncode == 0 else run.stdout + run.stderr or f"exit code {run.returncode}"


def _without(name: str, number: int) -> dict[str, str]:
    files = sources()
    lines = files[name].splitlines(keepends=True)
    lines[number] = lines[number].replace("__syncthreads();", "", 1)
    return files | {name: "".join(lines)}


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_sanitizers_find_nothing(tmp_path: Path, sanitizer: str) -> None:
    assert exercise(tmp_path, sources(), sanitizer) == ""


@pytest.mark.parametrize(("name", "number"), barriers())
def test_a_missing_barrier_is_a_race(tmp_path: Path, name: str, number: int) -> None:
    assert REPORTS["thread"] in exercise(tmp_path, _without(name, number), "thread")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(tmp_path: Path, fault: str) -> None:
    name, right, wrong = FAULTS[fault]
    files = sources()
    assert files[name].count(right) >= 1
    assert exercise(tmp_path, files | {name: files[name].replace(right, wrong)}, None)


def test_the_source_as_it_is_passes_in_any_order_of_threads(tmp_path: Path) -> None:
    assert exercise(tmp_path, sources(), None) == ""
    assert exercise(tmp_path, sources(), None, "--reverse") == ""
