"""The builds of the compiled CPU library, one for each instruction level."""

from collections.abc import Iterator

import pytest
import torch

from tessera_cli.kernels.cpu_library import CpuLibrary, load_library


@pytest.fixture(params=["base", "x86-64-v3", "x86-64-v4", "x86-64-v4-vnni"])
def build(request: pytest.FixtureRequest) -> CpuLibrary:
    """Every build that this machine can run, in turn."""
    library = load_library(request.param)
    if not isinstance(library, CpuLibrary):
        pytest.skip(library)
    return library


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Numbers of threads; torch has its own again afterwards."""
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)
