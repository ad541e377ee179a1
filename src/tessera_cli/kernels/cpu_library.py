"""Finds and loads the compiled CPU library, the best build of it that this machine can run."""

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from tessera_cli import kernels

# The same numbers are in vectors.hpp.
ACTIVATION_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
KINDS = ACTIVATION_KINDS | {torch.int8: 3, torch.float8_e4m3fn: 4}  # in which keys and values are stored

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_SIGNATURES = {
    "tessera_cpu_level": (),
    "tessera_attend": (_POINTER, _POINTER, *(_POINTER, _LONG) * 3, _POINTER, _INT, _INT),
    "tessera_copy_blocks": (_POINTER, _INT, _POINTER, _POINTER, _LONG, _INT),
    "tessera_advise_huge_pages": (_POINTER, _LONG),
    "tessera_add_rms_norm": (*(_POINTER,) * 4, _LONG, _INT, ctypes.c_float, _INT, _INT),
    "tessera_rotate": (*(_POINTER,) * 3, *(_LONG,) * 2, *(_INT,) * 4),
    "tessera_silu_and_mul": (*(_POINTER,) * 2, _LONG, _INT, _INT, _INT),
    "tessera_rms_norm_backward": (*(_POINTER,) * 7, _LONG, _INT, ctypes.c_float, _INT),
    "tessera_silu_and_mul_backward": (*(_POINTER,) * 3, _LONG, _INT, _INT),
    "tessera_rotate_into": (*(_POINTER,) * 4, *(_LONG,) * 2, *(_INT,) * 2, ctypes.c_float, _INT),
    "tessera_panel_columns": (),
    "tessera_float32_pack": (*(_POINTER,) * 2, *(_LONG,) * 2, _INT),
    "tessera_float32_linear": (*(_POINTER,) * 3, *(_LONG,) * 3, _INT),
    "tessera_int8_pack": (*(_POINTER,) * 2, *(_LONG,) * 2, _INT),
    "tessera_int8_linear": (*(_POINTER,) * 4, ctypes.c_float, *(_LONG,) * 3, _INT),
    "tessera_decoder_layers": (*(_POINTER,) * 2, _INT, *(_POINTER,) * 5, ctypes.c_float, _POINTER, _INT),
    "tessera_truncate": (_POINTER, _LONG, _POINTER, _LONG, *(_POINTER,) * 2, _INT),
}
_RESULTS = {"tessera_cpu_level": _INT, "tessera_panel_columns": _INT}
# By what `tessera_cpu_level` says; the best first.
_BUILDS = {
    5: ("x86-64-v4-vnni", "x86-64-v4", "x86-64-v3", "base"),
    4: ("x86-64-v4", "x86-64-v3", "base"),
    3: ("x86-64-v3", "base"),
    0: ("base",),
}


class Layer(ctypes.Structure):
    """`Layer` of kv_cache.hpp: one layer's cache and numbers."""

    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("key_scales", _POINTER),
        ("value_scales", _POINTER),
        ("kind", _INT),
        ("num_heads", _INT),
        ("num_kv_heads", _INT),
        ("head_dim", _INT),
        ("block_size", _INT),
        ("window", _INT),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class Step(ctypes.Structure):
    """`Step` of kv_cache.hpp: where the tables of one step are."""

    _fields_ = (
        ("query_start_loc", _POINTER),
        ("seq_lens", _POINTER),
        ("block_tables", _POINTER),
        ("slot_mapping", _POINTER),
        ("num_seqs", _INT),
        ("table_width", _INT),
        ("num_tokens", _LONG),
    )


class Linear(ctypes.Structure):
    """`Linear` of decoder_layers.cpp: a product with packed weights."""

    _fields_ = (
        ("packed", _POINTER),
        ("scales", _POINTER),
        ("bias", _POINTER),
        ("outputs", _LONG),
        ("inputs", _LONG),
        ("largest", ctypes.c_float),
    )


class DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of decoder_layers.cpp: one layer's weights."""

    _fields_ = (
        ("input_norm", _POINTER),
        ("post_norm", _POINTER),
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("rotates", _INT),
    )


@dataclass(frozen=True)
class CpuLibrary:
    """The loaded library.

    Attributes:
        build: its instruction level: base, x86-64-v3, x86-64-v4 or x86-64-v4-vnni.
        path: its file.
        functions: the C functions, with their argument types set. A call lets go of the interpreter lock.
    """

    build: str
    path: Path
    functions: ctypes.CDLL


@cache
def load_library(build: str | None = None) -> CpuLibrary | str:
    """The best build that this machine can run, or `build`; or the reason why there is none, in a few words.

    Loaded once in a process. It uses the OpenMP run time that torch has loaded: one pool of threads for both.
    """
    base = _find("base", kernels.__path__)
    if base is None:
        return "this installation was built without a C++ compiler; with g++ installed, install Tessera again"
    try:
        library = _load("base", base)
        for name in _BUILDS[library.functions.tessera_cpu_level()]:
            path = _find(name, kernels.__path__)
            if path is not None and build in (None, name):
                return library if name == "base" else _load(name, path)
        return f"this machine cannot run a build for {build}"
    except (OSError, AttributeError) as error:
        return f"the compiled library does not load: {error}"


def _find(build: str, folders: Iterable[str]) -> Path | None:
    paths = (Path(folder) / f"libtessera_cpu_{build}.so" for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def _load(build: str, path: Path) -> CpuLibrary:
    functions = ctypes.CDLL(str(path))
    for name, arguments in _SIGNATURES.items():
        function = getattr(functions, name)
        function.argtypes = arguments
        function.restype = _RESULTS.get(name)
    return CpuLibrary(build, path, functions)


def address(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's data begins; null for none."""
    return None if tensor is None else tensor.data_ptr()
