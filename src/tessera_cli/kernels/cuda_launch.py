"""Kernels on a CUDA device: their arguments as the source declares them, and the launch."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from cuda.bindings import driver

from tessera_cli.errors import RunError
from tessera_cli.kernels.cuda_arguments import Arguments
from tessera_cli.kernels.cuda_compile import compile_kernels
from tessera_cli.settings import Settings

_STATIC_SHARED_BYTES = 48 << 10  # what a launch may have without being asked for


class CudaKernels:
    """Kernels by their C++ names, loaded on one device.

    Args:
        names: C++ template instances of the kernels' source.
        device: where they run.

    Raises:
        RunError: they cannot be compiled or loaded.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        properties = torch.cuda.get_device_properties(device)
        self.num_multiprocessors: int = properties.multi_processor_count
        self._device = device
        compiled = compile_kernels(
            names, f"sm_{properties.major}{properties.minor}", Settings.from_env().home / "kernels"
        )
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # there is a context from here on
            self._module = _call(driver.cuModuleLoadData, compiled.cubin)
            self._functions = {
                name: _call(driver.cuModuleGetFunction, self._module, symbol.encode())
                for name, symbol in compiled.symbols.items()
            }
        self._shared_bytes: dict[str, int] = {}

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, shared_bytes: int, arguments: Arguments
    ) -> None:
        """Start one kernel on PyTorch's current stream; can be captured in a CUDA graph.

        Args:
            name: as given at construction.
            grid: thread blocks in each direction, at least 1.
            threads: of a block.
            shared_bytes: of dynamic shared memory.
            arguments: copied at the launch.

        Raises:
            RunError: the launch was refused.
        """
        pointer = ctypes.c_void_p(ctypes.addressof(arguments))
        with torch.cuda.device(self._device):
            function = self._functions[name]
            if shared_bytes > self._shared_bytes.get(name, _STATIC_SHARED_BYTES):
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _call(driver.cuFuncSetAttribute, function, limit, shared_bytes)
                self._shared_bytes[name] = shared_bytes
            stream = torch.cuda.current_stream().cuda_stream
            parameters = ctypes.addressof(pointer)
            _call(driver.cuLaunchKernel, function, *grid, threads, 1, 1, shared_bytes, stream, parameters, 0)


def _call(function: Any, *arguments: Any) -> Any:
    """What a driver function returns besides its status.

    Raises:
        RunError: the status is not success.
    """
    status, *results = function(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RunError(f"CUDA: {function.__name__} gives {status.name}")
    return results[0] if results else None
