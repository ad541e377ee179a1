"""Memory that a training process frees, and what it costs to have it again."""

import ctypes
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
import torch
from tessera_cli.distill.training.freed_memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()
for size in (40, 3, 40) * 4:  # megabytes; afterwards the holes in memory have their sizes
    torch.ones(size << 18)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for size in (40, 3, 40):
    torch.ones(size << 18)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"), reason="another allocator"
)
def test_kept_memory_is_not_asked_of_the_system_again() -> None:
    assert _page_faults("kept") < 100 < _page_faults("given back")


def _page_faults(how: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, how]
    return int(subprocess.run(command, capture_output=True, check=True).stdout)
