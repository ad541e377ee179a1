"""Compiled linear layers beside torch's, as ratios of the lowest times of one run.

    python -m benchmarks.linear [--tokens 1,16,64,256] [--build x86-64-v3] [--prepacked]

Shapes are SmolLM2-135M's. The sides are timed in turn, on weights of several layers, so that no side finds in
a cache what a model reads from memory. Where a build below the machine's best is measured, hold torch to the
same instructions: MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import lowest
from tessera_cli.int8_weight import Int8Weight
from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
from tessera_cli.kernels.float32_linear import Float32Linear
from tessera_cli.kernels.int8_linear import Int8Linear

# (inputs, outputs): queries with keys and values, the attention's output, gate with up, down, the head.
_SHAPES = ((576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152))
_WEIGHTS_BYTES = 100e6  # of float32 weights that are read in turn, and at least two matrices
Product = Callable[[Tensor], Tensor]


def products(library: CpuLibrary, weight: Tensor, num_tokens: int, prepacked: bool) -> Iterator[Product]:
    """Torch's, which all others are compared to, then those of `columns`, all of one weight."""
    yield lambda x: F.linear(x, weight)
    yield Float32Linear(library, weight)
    yield Int8Linear(library, Int8Weight.quantise(weight))
    if prepacked:
        onednn = torch.ops.mkldnn._reorder_linear_weight(weight)
        mkl = torch.ops.mkl._mkl_reorder_linear_weight(weight, num_tokens)
        yield lambda x: torch.ops.mkldnn._linear_pointwise(x, onednn, None, "none", [], "")
        yield lambda x: torch.ops.mkl._mkl_linear(x, mkl, weight, None, num_tokens)


def columns(prepacked: bool) -> list[str]:
    """What `products` gives after the first one."""
    return ["float32", "int8", *(["oneDNN", "MKL"] if prepacked else [])]


def measure(
    library: CpuLibrary, weights: list[Tensor], num_tokens: int, *, prepacked: bool, seconds: float
) -> list[float]:
    """Lowest seconds of each of `products`."""
    sides = list(zip(*(products(library, weight, num_tokens, prepacked) for weight in weights), strict=True))
    x = torch.randn(num_tokens, weights[0].shape[1])

    def run(side: tuple[Product, ...]) -> Callable[[int], object]:
        return lambda index: side[index % len(side)](x)

    return lowest(seconds, *(run(side) for side in sides))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64,128,256,512")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each side of a ratio")
    parser.add_argument("--build", help="an instruction level; the machine's best by default")
    parser.add_argument(
        "--prepacked", action="store_true", help="also oneDNN's and MKL's own packed forms, through torch"
    )
    arguments = parser.parse_args()
    library = load_library(arguments.build)
    if not isinstance(library, CpuLibrary):
        raise SystemExit(f"no compiled kernels: {library}")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    names = columns(arguments.prepacked)
    print(f"{library.build}, {arguments.threads} threads; torch's lowest time, and others' speed over it")
    print(f"{'inputs':>6} {'outputs':>7} {'tokens':>6} {'torch ms':>9}", *(f"{name:>7}" for name in names))
    with torch.inference_mode():
        for inputs, outputs in _SHAPES:
            count = max(2, round(_WEIGHTS_BYTES / (4 * inputs * outputs)))
            weights = [torch.randn(outputs, inputs) for _ in range(count)]
            for tokens in map(int, arguments.tokens.split(",")):
                base, *others = measure(
                    library, weights, tokens, prepacked=arguments.prepacked, seconds=arguments.seconds
                )
                ratios = (f"{base / other:7.2f}" for other in others)
                print(f"{inputs:6} {outputs:7} {tokens:6} {base * 1e3:9.3f}", *ratios, flush=True)


if __name__ == "__main__":
    main()
