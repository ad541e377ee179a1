"""Low-rank adapters (arXiv 2106.09685) on a student, through peft: added, saved, merged."""

import importlib.util
from pathlib import Path

import torch

from tessera_cli.errors import UsageError
from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.train_section import LoraSection


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
    """Add the adapters to the weights in place, W + alpha / r · B A in float32, and leave a plain decoder."""
    from peft.tuners.lora import LoraLayer

    for layer in student.layers:
        for name, module in layer.named_children():
            if isinstance(module, LoraLayer):
                module.merge(safe_merge=True)
                setattr(layer, name, module.get_base_layer())
    student.requires_grad_(True)


def save_adapters(student: Decoder, path: Path, *, base: str) -> None:
    """Write the adapters of `student` as a directory that peft loads onto the model `base`."""
    raise NotImplementedError
