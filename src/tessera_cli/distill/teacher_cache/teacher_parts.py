"""The parts of a teacher that a cached run needs, without the rest of its body."""

import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def load_layers(
    path: Path, layers: Sequence[int], *, dtype: torch.dtype, device: torch.device | str
) -> Decoder:
    """The teacher in `path` as if it had only `layers`, at least one: with its embeddings, norm and head.

    The other layers are never read.

    Raises:
        ModelError: as `load_decoder`.
    """
    config = ModelConfig.unquantised(path).with_layers(layers)
    with tempfile.TemporaryDirectory(prefix="tessera-") as directory:
        cut = Path(directory)
        (cut / "config.json").write_text(json.dumps(config.to_hf()), encoding="utf-8")
        save_file(_tensors(path, layers), cut / "model.safetensors")
        return load_decoder(cut, dtype=dtype, device=device)


def head_of(teacher: Decoder) -> Decoder:
    """`teacher` with its layers let go: only what is around them stays in memory."""
    teacher.layers = nn.ModuleList()
    return teacher


def _tensors(path: Path, layers: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of `layers`, renamed to be 0, 1, ..., and those of no layer."""
    tensors = {}
    place = {layer: index for index, layer in enumerate(layers)}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                match = _LAYER.fullmatch(name)
                if match is None:
                    tensors[name] = stored.get_tensor(name)
                elif int(match[1]) in place:
                    tensors[f"model.layers.{place[int(match[1])]}.{match[2]}"] = stored.get_tensor(name)
    return tensors
