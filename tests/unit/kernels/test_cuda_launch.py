"""What a launch hands to the CUDA driver, seen by a driver that only writes down."""

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tessera_cli.errors import RunError
from tessera_cli.kernels.cuda_arguments import WriteArguments, WriteSide

pytest.importorskip("cuda.bindings.driver", reason="the launch needs cuda-bindings")

from tessera_cli.kernels import cuda_launch
from tessera_cli.kernels.cuda_compile import Compiled

STREAM = 77


class Driver:
    """Answers success, or `refusal` to launches, and keeps what it was given."""

    CUresult = cuda_launch.driver.CUresult
    CUfunction_attribute = cuda_launch.driver.CUfunction_attribute

    def __init__(self) -> None:
        self.attributes: list[tuple[Any, ...]] = []
        self.launches: list[tuple[Any, ...]] = []
        self.structures: list[WriteArguments] = []
        self.answer = self.CUresult.CUDA_SUCCESS

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, str]:  # noqa: N802
        return self.CUresult.CUDA_SUCCESS, f"module of {image.decode()}"

    def cuModuleGetFunction(self, module: str, symbol: bytes) -> tuple[Any, str]:  # noqa: N802
        return self.CUresult.CUDA_SUCCESS, f"{symbol.decode()} of {module}"

    def cuFuncSetAttribute(self, *arguments: Any) -> tuple[Any]:  # noqa: N802
        self.attributes.append(arguments)
        return (self.CUresult.CUDA_SUCCESS,)

    def cuLaunchKernel(self, *arguments: Any) -> tuple[Any]:  # noqa: N802
        *launch, parameters, extra = arguments
        (pointer,) = (ctypes.c_void_p * 1).from_address(parameters)
        copied = WriteArguments.from_buffer_copy(
            (ctypes.c_char * ctypes.sizeof(WriteArguments)).from_address(pointer)
        )
        self.launches.append((*launch, extra))
        self.structures.append(copied)
        return (self.answer,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    stream = SimpleNamespace(cuda_stream=STREAM, synchronize=lambda: None)
    compiled = Compiled(b"sm_90", {"copy_blocks": "symbol"})
    monkeypatch.setattr(cuda_launch, "driver", driver)
    monkeypatch.setattr(cuda_launch, "compile_kernels", lambda names, architecture, cache: compiled)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return driver


def _arguments() -> WriteArguments:
    return WriteArguments(WriteSide(1, 2, 3, 4), WriteSide(5, 6, 7, 8), 9, 10, 11)


def test_a_launch_hands_over_the_grid_the_stream_and_the_structure(driver: Driver) -> None:
    kernels = cuda_launch.CudaKernels(["copy_blocks"], torch.device("cuda", 0))
    assert kernels.num_multiprocessors == 132
    kernels.launch("copy_blocks", (4, 3, 2), 128, 1000, _arguments())
    assert driver.launches == [("symbol of module of sm_90", 4, 3, 2, 128, 1, 1, 1000, STREAM, 0)]
    assert bytes(driver.structures[0]) == bytes(_arguments())


def test_more_shared_memory_than_a_launch_may_have_is_asked_for_once(driver: Driver) -> None:
    kernels = cuda_launch.CudaKernels(["copy_blocks"], torch.device("cuda", 0))
    for shared_bytes in (48 << 10, 60_000, 60_000):
        kernels.launch("copy_blocks", (1, 1, 1), 128, shared_bytes, _arguments())
    limit = Driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.attributes == [("symbol of module of sm_90", limit, 60_000)]


def test_a_refused_launch_is_one_line(driver: Driver) -> None:
    kernels = cuda_launch.CudaKernels(["copy_blocks"], torch.device("cuda", 0))
    driver.answer = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RunError, match="cuLaunchKernel gives CUDA_ERROR_INVALID_VALUE"):
        kernels.launch("copy_blocks", (1, 1, 1), 128, 0, _arguments())
