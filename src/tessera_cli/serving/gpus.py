"""What named GPUs can do at best, from their makers' data sheets."""

from dataclasses import dataclass

from tessera_cli.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """Peak dense 16-bit matrix arithmetic in FLOP/s, memory in bytes/s and in bytes."""

    name: str
    flops: float
    memory_bandwidth: float
    memory: int


_GB = 10**9

GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA H100 Tensor Core GPU data sheet, SXM: 1,979 TFLOPS with sparsity, half of it dense.
        Gpu("h100-sxm", 989e12, 3.35e12, 80 * _GB),
        # NVIDIA H200 Tensor Core GPU data sheet, SXM: 1,979 TFLOPS with sparsity.
        Gpu("h200", 989e12, 4.8e12, 141 * _GB),
        # NVIDIA A100 data sheet, 80GB SXM: 312 TFLOPS dense, 2,039 GB/s.
        Gpu("a100-80g", 312e12, 2.039e12, 80 * _GB),
        # NVIDIA L4 data sheet: 242 TFLOPS with sparsity.
        Gpu("l4", 121e12, 300e9, 24 * _GB),
        # NVIDIA Ada GPU architecture white paper, RTX 4090: 165.2 TFLOPS dense with FP32 accumulation.
        Gpu("rtx-4090", 165.2e12, 1.008e12, 24 * _GB),
    )
}


def find_gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        UsageError: none is known by it.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise UsageError(f"no figures for a GPU {name!r}", hint="there are " + ", ".join(GPUS))
    return gpu
