"""Which build of the compiled CPU library is loaded."""

import pytest

from tessera_cli.kernels.cpu_library import CpuLibrary, load_library

pytestmark = pytest.mark.skipif(not isinstance(load_library(), CpuLibrary), reason=str(load_library()))


def test_the_best_build_is_loaded_once() -> None:
    best = load_library()
    assert isinstance(best, CpuLibrary)
    assert load_library() is best
    by_name = load_library(best.build)
    assert isinstance(by_name, CpuLibrary)
    assert by_name.path == best.path


def test_a_build_that_this_machine_cannot_run_is_named() -> None:
    assert load_library("x86-64-v9") == "this machine cannot run a build for x86-64-v9"
