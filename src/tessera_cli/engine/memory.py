"""How much memory a device has: all of it, and what is free; a container's limit counts as all."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device: `total`, and `free` for a process that takes more."""

    total: int
    free: int


def device_memory(device: str) -> DeviceMemory:
    """The memory of a CUDA device, or of the machine within the limits of the process's control groups."""
    if device.partition(":")[0] == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free)
    machine = psutil.virtual_memory()
    limits = list(_group_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))
    return DeviceMemory(
        min([machine.total, *(limit.total for limit in limits)]),
        min([machine.available, *(limit.free for limit in limits)]),
    )


def return_freed_memory() -> None:
    """Give the system back what the process has freed and glibc still holds; without glibc do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# Files of a memory control group: limit, usage, and the line of memory.stat for the pages of files that are
# dropped when memory is needed; as the kernel's documentation has them in cgroup-v2 and cgroup-v1/memory.
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _group_limits(membership: Path, mount: Path) -> Iterator[DeviceMemory]:
    """The limits of the process's groups and of all groups that these are in, if any."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # no control groups, as on macOS
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = mount, _VERSION_2
        elif "memory" in controllers.split(","):
            root, files = mount / "memory", _VERSION_1
        else:
            continue
        group = root / path.lstrip("/")
        # In a container the path may be the host's; only the groups that are mounted are found.
        for place in (group, *group.parents):
            if place.is_relative_to(root):
                yield from _limit(place, *files)


def _limit(group: Path, limit: str, usage: str, reclaimable: str) -> Iterator[DeviceMemory]:
    try:
        total, used = int((group / limit).read_text()), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        return
    yield DeviceMemory(total, max(total - used + int(stat.get(reclaimable, 0)), 0))
