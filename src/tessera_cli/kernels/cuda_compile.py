"""The CUDA kernels from source to machine code, at first use, by NVRTC: no toolkit and no host compiler."""

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc
from cuda.pathfinder import find_nvidia_header_directory

from tessera_cli.errors import RunError
from tessera_cli.files import write_file

_DIRECTORY = Path(__file__).parent
SOURCE = "paged_attention.cu"


@dataclass(frozen=True)
class Compiled:
    """Machine code of some kernels.

    Attributes:
        cubin: the image, for one architecture.
        symbols: the name of each kernel in the image, by its C++ name.
    """

    cubin: bytes
    symbols: dict[str, str]


def compile_kernels(names: Sequence[str], architecture: str, cache: Path) -> Compiled:
    """The kernels `names`, C++ template instances such as ``merge_splits<__half, 64>``.

    Args:
        names: their C++ names, in any order.
        architecture: such as ``sm_90``.
        cache: a directory that may not exist yet; what is compiled is kept there by source, names,
            architecture and NVRTC version.

    Raises:
        RunError: NVRTC is not usable or refuses the source.
    """
    names = sorted(set(names))
    major, minor = _call(nvrtc.nvrtcVersion)
    files = _sources()
    identity = json.dumps([files, names, architecture, major, minor])
    entry = cache / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"
    found = _read(entry)
    if found is None:
        found = _compile(files, names, architecture)
        cache.mkdir(parents=True, exist_ok=True)
        write_file(
            entry, json.dumps({"cubin": base64.b64encode(found.cubin).decode(), "symbols": found.symbols})
        )
    return found


def _sources() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted([*_DIRECTORY.glob("*.cuh"), _DIRECTORY / SOURCE])}


def _read(entry: Path) -> Compiled | None:
    """A cached image; None where there is none, or it cannot be read as one."""
    try:
        content = json.loads(entry.read_text())
        return Compiled(base64.b64decode(content["cubin"]), content["symbols"])
    except (OSError, ValueError, KeyError):
        return None


def _compile(files: dict[str, str], names: Sequence[str], architecture: str) -> Compiled:
    headers = {name: text.encode() for name, text in files.items() if name != SOURCE}
    program = _call(
        nvrtc.nvrtcCreateProgram,
        files[SOURCE].encode(),
        SOURCE.encode(),
        len(headers),
        list(headers.values()),
        [name.encode() for name in headers],
    )
    try:
        for name in names:
            _call(nvrtc.nvrtcAddNameExpression, program, name.encode())
        options = [f"--gpu-architecture={architecture}", "--std=c++17", f"--include-path={_cuda_headers()}"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * _call(nvrtc.nvrtcGetProgramLogSize, program)
            _call(nvrtc.nvrtcGetProgramLog, program, log)
            raise RunError(f"the CUDA kernels do not compile for {architecture}: {_first_error(log, status)}")
        symbols = {name: _call(nvrtc.nvrtcGetLoweredName, program, name.encode()).decode() for name in names}
        cubin = b" " * _call(nvrtc.nvrtcGetCUBINSize, program)
        _call(nvrtc.nvrtcGetCUBIN, program, cubin)
        return Compiled(cubin, symbols)
    finally:
        _call(nvrtc.nvrtcDestroyProgram, program)


def _first_error(log: bytes, status: Any) -> str:
    lines = log.decode(errors="replace").strip("\0 \n").splitlines()
    return next((line for line in lines if "error" in line), f"{status.name}")


def _cuda_headers() -> str:
    directory = find_nvidia_header_directory("cudart")
    if directory is None:
        raise RunError(
            "the CUDA kernels need cuda_fp16.h, which is not found",
            hint="install nvidia-cuda-runtime, which CUDA builds of PyTorch depend on",
        )
    return str(directory)


def _call(function: Any, *arguments: Any) -> Any:
    """What an NVRTC function returns besides its status.

    Raises:
        RunError: NVRTC is missing, or the status is not success.
    """
    try:
        status, *results = function(*arguments)
    except RuntimeError as error:  # from cuda.bindings, where there is no library
        raise RunError(
            f"NVRTC cannot be loaded: {str(error).splitlines()[0]}",
            hint="install nvidia-cuda-nvrtc, which CUDA builds of PyTorch depend on",
        ) from None
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RunError(f"NVRTC: {function.__name__} gives {status.name}")
    return results[0] if len(results) == 1 else tuple(results)
