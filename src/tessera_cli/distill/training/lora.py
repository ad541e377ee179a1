"""Low-rank adapters (arXiv 2106.09685) on a student, through peft: added, saved, merged."""

import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tessera_cli.errors import RunError, UsageError
from tessera_cli.models.checkpoint_tensors import split_module
from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.train_section import LoraSection

_MATRICES = ("lora_A", "lora_B")


def check_peft() -> None:
    """See that adapters can be trained here.

    Raises:
        UsageError: peft is not installed.
    """
    if importlib.util.find_spec("peft") is None:
        raise UsageError(
            "`train.lora` needs peft, which is not installed", hint="`pip install 'tessera-cli[lora]'`"
        )


def add_adapters(student: Decoder, section: LoraSection, *, seed: int) -> None:
    """Put adapters on `student` in place, and freeze everything else; its outputs stay what they were."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=section.r,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=list(section.target_modules),
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, student)


def merge_adapters(student: Decoder) -> None:
    """Add the adapters to the weights in place, W + alpha / r · B A in float32, and leave a plain decoder.

    Raises:
        RunError: the weights would not be finite.
    """
    for layer in student.layers:
        for name, module in _adapted(layer):
            _merge(module)
            setattr(layer, name, module.get_base_layer())
    student.requires_grad_(True)


@contextmanager
def merged_adapters(student: Decoder) -> Iterator[None]:
    """In here `student` has, to the bit, the weights of `merge_adapters`; after it those that it had.

    Raises:
        RunError: as `merge_adapters`; the weights are those that it had.
    """
    with ExitStack() as undo:
        for layer in student.layers:
            for _, module in _adapted(layer):
                undo.callback(_take_off, module, module.get_base_layer().weight.data)
                _merge(module)
        yield


def _adapted(layer: nn.Module) -> list[tuple[str, Any]]:
    """The products of `layer` that have adapters, by name; no peft is needed where there are none."""
    return [(name, module) for name, module in layer.named_children() if hasattr(module, _MATRICES[0])]


def _merge(module: Any) -> None:
    try:
        module.merge(safe_merge=True)
    except ValueError as error:  # so peft tells it
        raise RunError(
            "the adapters have diverged: merged weights are not finite",
            hint="lower train.learning_rate and start a new run",
        ) from error


def _take_off(module: Any, weight: Tensor) -> None:
    # peft's own way back subtracts, and each time rounds frozen weights a little further off.
    module.get_base_layer().weight.data = weight
    module.merged_adapters.clear()


def save_adapters(student: Decoder, path: Path, section: LoraSection, *, base: str) -> None:
    """Write the adapters as a directory that peft loads onto transformers' model of the unmerged student.

    A fused product has one A for its parts, and the parts of its B: the same sum under the names of others.

    Args:
        student: with adapters, not merged.
        path: must exist.
        section: as the adapters were made.
        base: what the student was before, as its name.
    """
    from peft import LoraConfig

    tensors: dict[str, Tensor] = {}
    names: set[str] = set()
    for index, layer in enumerate(student.layers):
        for ours in section.target_modules:
            module = layer.get_submodule(ours)
            down, up = (getattr(module, matrix)["default"].weight.detach().cpu() for matrix in _MATRICES)
            for theirs, part in split_module(student.config, ours, up):
                key = f"base_model.model.model.layers.{index}.{theirs}"
                tensors[f"{key}.lora_A.weight"] = down.clone()
                tensors[f"{key}.lora_B.weight"] = part.contiguous()
                names.add(theirs.rpartition(".")[2])
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=section.r,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=sorted(names),
        inference_mode=True,
    ).save_pretrained(str(path))
