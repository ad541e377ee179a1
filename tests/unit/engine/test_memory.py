"""How much memory a device is said to have."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tessera_cli.engine import memory
from tessera_cli.engine.memory import DeviceMemory, device_memory, return_freed_memory


def _group(path: Path, *, limit: str, usage: int, inactive: int, version: int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    names = {2: ("memory.max", "memory.current", "inactive_file")}
    names[1] = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    limit_file, usage_file, stat = names[version]
    (path / limit_file).write_text(f"{limit}\n")
    (path / usage_file).write_text(f"{usage}\n")
    (path / "memory.stat").write_text(f"anon 5\n{stat} {inactive}\nfile 7\n")


def _limits(tmp_path: Path, membership: str) -> list[DeviceMemory]:
    (tmp_path / "cgroup").write_text(membership)
    return list(memory._group_limits(tmp_path / "cgroup", tmp_path / "fs"))


@pytest.mark.parametrize(("version", "line", "root"), [(2, "0::/a/b", ""), (1, "4:memory:/a/b", "memory")])
def test_every_group_above_the_process_limits_it(tmp_path: Path, version: int, line: str, root: str) -> None:
    top = tmp_path / "fs" / root
    _group(top / "a" / "b", limit="1000", usage=400, inactive=50, version=version)
    _group(top / "a", limit="900", usage=899, inactive=0, version=version)
    _group(top / "elsewhere", limit="1", usage=1, inactive=0, version=version)
    found = _limits(tmp_path, f"7:cpu:/a\n{line}\n")
    assert found == [DeviceMemory(1000, 650), DeviceMemory(900, 1)]


def test_no_limit_is_no_limit(tmp_path: Path) -> None:
    _group(tmp_path / "fs" / "a", limit="max", usage=400, inactive=50, version=2)
    assert _limits(tmp_path, "0::/a\n") == []
    assert _limits(tmp_path, "0::/not/mounted\n1:memory:/neither\n") == []
    assert list(memory._group_limits(tmp_path / "missing", tmp_path)) == []


def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = SimpleNamespace(total=1000, available=300)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    monkeypatch.setattr(memory, "_group_limits", lambda *paths: iter([DeviceMemory(800, 500)]))
    assert device_memory("cpu") == DeviceMemory(800, 300)
    monkeypatch.setattr(memory, "_group_limits", lambda *paths: iter([DeviceMemory(2000, 200)]))
    assert device_memory("cpu") == DeviceMemory(1000, 200)


def test_a_gpu_says_itself_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {"cuda:1": (3, 7)}[device])
    assert device_memory("cuda:1") == DeviceMemory(7, 3)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_what_was_freed_goes_back_to_the_system() -> None:
    pieces = [bytearray(50_000) for _ in range(1000)]
    held = bytearray(50_000)  # behind them: the heap cannot shrink by itself
    pieces.clear()
    before = psutil.Process().memory_info().rss
    return_freed_memory()
    assert before - psutil.Process().memory_info().rss > 30_000_000
    del held
