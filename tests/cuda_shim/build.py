"""The kernels' source as a library for the CPU, and the stand-in for `CudaKernels` that launches from it."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import tessera_cli.kernels
from tessera_cli.kernels.cuda_arguments import Arguments

SHIM = Path(__file__).parent
KERNELS = Path(tessera_cli.kernels.__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ("-std=c++20", "-O1", "-march=native", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC")


def sources() -> dict[str, str]:
    """The kernels' source files by name, and the shim's library."""
    paths = [*KERNELS.glob("*.cuh"), KERNELS / "paged_attention.cu", SHIM / "library.cpp"]
    return {path.name: path.read_text() for path in paths if path.name != "ptx.cuh"}


def build(
    names: Sequence[str],
    directory: Path,
    *,
    flags: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
) -> Path:
    """Compile the kernels `names` for this machine; what was built before from the same is taken as it is.

    Args:
        names: C++ template instances.
        directory: where the library goes.
        flags: for the compiler, beside `FLAGS`.
        files: contents by name, where they are not `sources()`.

    Raises:
        AssertionError: the compiler refuses.
    """
    files = files or sources()
    shim = {path.name: path.read_text() for path in sorted(SHIM.glob("*.*")) if path.suffix != ".py"}
    identity = repr((sorted(files.items()), sorted(shim.items()), sorted(names), tuple(flags), FLAGS))
    target = directory / hashlib.sha256(identity.encode()).hexdigest()[:16]
    library = target / "kernels.so"
    if library.exists():
        return library
    target.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (target / name).write_text(text)
    (target / "instances.inc").write_text("".join(f"INSTANCE({name})\n" for name in sorted(names)))
    partial = target / f"{os.getpid()}.so"
    command = [
        str(COMPILER),
        *FLAGS,
        *flags,
        "-shared",
        f"-I{SHIM}",
        f"-I{target}",
        str(target / "library.cpp"),
    ]
    run = subprocess.run([*command, "-o", str(partial)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    partial.replace(library)  # whole, whoever else builds the same at this moment
    return library


class ShimKernels:
    """Launches kernels of a library made by `build`, one thread block after another.

    `num_multiprocessors` is chosen by the tests: the more there are, the more splits.
    """

    def __init__(self, library: Path, *, num_multiprocessors: int = 4, reverse: bool = False) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.shim_run.restype = ctypes.c_char_p
        self._library.shim_bytes_of.restype = ctypes.c_size_t
        self.num_multiprocessors = num_multiprocessors
        self.reverse = reverse
        self.launched: list[str] = []

    def load(self, names: Sequence[str], device: torch.device) -> "ShimKernels":
        """In the place of `cuda.load_kernels`."""
        del names, device
        return self

    def bytes_of(self, structure: str) -> int:
        """The size of one of the kernels' argument structures."""
        return int(self._library.shim_bytes_of(structure.encode()))

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: Arguments
    ) -> None:
        """Like `CudaKernels.launch`, but done on return.

        Raises:
            AssertionError: the shim found a barrier that is not met, or memory that is not the kernel's.
        """
        self.launched.append(name)
        error = self._library.shim_run(
            name.encode(),
            (ctypes.c_uint * 3)(*grid),
            threads,
            ctypes.c_size_t(shared_bytes),
            self.reverse,
            ctypes.byref(arguments),
        )
        assert error is None, f"{name}: {error.decode()}"
