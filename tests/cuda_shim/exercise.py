"""A few steps through a library of `build`, for sanitizers and planted faults; fails if a result is wrong.

python -m tests.cuda_shim.exercise LIBRARY [--reverse]
"""

import sys
from pathlib import Path

import torch

from tessera_cli.kernels import cuda
from tests.cuda_shim.build import ShimKernels
from tests.unit.kernels import parity
from tests.unit.kernels.parity import Case

# The first fits one tile of the decode kernel, four heads to a key head; the second needs the prefill kernel.
STEPS = ((70, 300, 5), (1, 3, 4)), ((200, 1), (90, 1))


def main() -> None:
    """Run every step in every type of kernel.

    Raises:
        AssertionError: a result is not the definition's, or the shim found a fault.
    """
    kernels = ShimKernels(Path(sys.argv[1]), num_multiprocessors=8, reverse="--reverse" in sys.argv)
    cuda.load_kernels = kernels.load  # type: ignore[assignment]
    for dtype, stored in (
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.int8),
        (torch.float16, torch.float8_e4m3fn),
    ):
        for window in (None, 40):
            for lengths, queries in STEPS:
                case = Case(
                    "step",
                    lengths,
                    queries,
                    heads=4,
                    kv_heads=1,
                    window=window,
                    dtype=dtype,
                    kv_cache_dtype=stored,
                )
                check(case)
    parity.check_slot_minus_one_is_not_written(cuda.CudaAttention)
    parity.check_copied_blocks_equal_their_sources(cuda.CudaAttention, dtypes=[torch.float32])


def check(case: Case) -> None:
    """The histories are stored without attending: only the step itself is run in full."""
    scene = parity.Scene.of(case)
    backend = scene.backend(cuda.CudaAttention)
    attend = backend._attend
    backend._attend = lambda *_: None
    scene.poison(backend)
    scene.fill(backend)
    backend._attend = attend
    out, expected = scene.attend(backend), scene.expected()
    error = float((out.double() - expected).norm() / expected.norm())
    assert error <= case.tolerance, f"{case}: relative error {error:.2e}"


if __name__ == "__main__":
    main()
