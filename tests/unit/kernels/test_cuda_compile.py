"""The kernels through NVRTC, which needs no device: they compile, spill nothing, and are cached."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import RunError
from tessera_cli.kernels.cuda_plan import layer_kernels

_NEEDED = "NVRTC needs cuda-bindings, nvidia-cuda-nvrtc and nvidia-cuda-runtime"
nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason=_NEEDED)
try:
    nvrtc.nvrtcVersion()
except RuntimeError:
    pytest.skip(_NEEDED, allow_module_level=True)

from tessera_cli.kernels import cuda_compile  # noqa: E402
from tessera_cli.kernels.cuda_compile import compile_kernels  # noqa: E402

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
COMMON = [
    (64, torch.float16, torch.float16),
    (64, torch.float32, torch.float32),
    (128, torch.bfloat16, torch.bfloat16),
    (128, torch.bfloat16, torch.int8),
    (64, torch.float16, torch.float8_e4m3fn),
    (128, torch.bfloat16, torch.float8_e4m3fn),
]
SMALL = ["merge_splits<__half, 64>", "copy_blocks"]


def _names(head_dim: int, dtype: torch.dtype, stored: torch.dtype) -> tuple[str, ...]:
    return layer_kernels(AttentionLayer(8, 2, head_dim, 1.0, None, None), dtype, stored).names


def _cuobjdump() -> str | None:
    site_packages = Path(nvrtc.__file__).parents[2]
    wheels = (str(path) for path in site_packages.glob("nvidia/*/bin/cuobjdump"))
    return shutil.which("cuobjdump") or next(wheels, None)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_compiles_for_every_architecture(architecture: str, tmp_path: Path) -> None:
    names = _names(64, torch.float16, torch.float16)
    compiled = compile_kernels(names, architecture, tmp_path)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert set(compiled.symbols) == set(names)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("head_dim", "dtype", "stored"), [*COMMON, (256, torch.float16, torch.float16)])
def test_nothing_is_spilled(
    head_dim: int, dtype: torch.dtype, stored: torch.dtype, architecture: str, tmp_path: Path
) -> None:
    tool = _cuobjdump()
    if tool is None:
        pytest.skip("there is no cuobjdump")
    compiled = compile_kernels(_names(head_dim, dtype, stored), architecture, tmp_path)
    image = tmp_path / "image.cubin"
    image.write_bytes(compiled.cubin)
    run = subprocess.run(
        [tool, "--dump-resource-usage", str(image)], capture_output=True, text=True, check=True
    )
    used = dict(re.findall(r"Function (\S+):\s*REG:\d+ STACK:(\d+)", run.stdout))
    assert set(used) >= set(compiled.symbols.values())
    assert all(stack == "0" for stack in used.values()), used


def test_what_was_compiled_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_kernels(SMALL, "sm_80", tmp_path)
    monkeypatch.setattr(cuda_compile, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_kernels(reversed(SMALL), "sm_80", tmp_path) == first


def test_another_source_name_or_architecture_is_another_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = cuda_compile.Compiled(b"image", {})
    monkeypatch.setattr(cuda_compile, "_compile", lambda *_: compiled)
    compile_kernels(SMALL, "sm_80", tmp_path)
    compile_kernels(SMALL, "sm_90", tmp_path)
    compile_kernels(SMALL[:1], "sm_80", tmp_path)
    monkeypatch.setattr(cuda_compile, "_sources", lambda: {"paged_attention.cu": "// changed"})
    compile_kernels(SMALL, "sm_80", tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


def test_an_entry_that_cannot_be_read_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = cuda_compile.Compiled(b"image", {"copy_blocks": "symbol"})
    monkeypatch.setattr(cuda_compile, "_compile", lambda *_: compiled)
    compile_kernels(SMALL, "sm_80", tmp_path)
    (entry,) = tmp_path.iterdir()
    entry.write_text("{")
    assert compile_kernels(SMALL, "sm_80", tmp_path) == compiled


def test_a_kernel_that_does_not_compile_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"do not compile for sm_80: .*error") as caught:
        compile_kernels(["no_such_kernel<float>"], "sm_80", tmp_path)
    assert "\n" not in caught.value.message
    assert list(tmp_path.iterdir()) == []
