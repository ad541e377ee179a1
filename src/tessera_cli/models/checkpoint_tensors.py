"""Where each tensor of a checkpoint belongs in a decoder, and how it gets there."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from tessera_cli.errors import ModelError
from tessera_cli.int8_weight import Int8Weight
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.weight_files import StoredTensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SCALE = "_scale"  # what the name of an int8 tensor's scales adds to its own
# Our module in a layer <- the checkpoint's modules, stacked in this order; not every family has all.
_MODULES = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
    "input_layernorm": ("input_layernorm",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "post_feedforward_layernorm": ("post_feedforward_layernorm",),
}
# Rows that are quantised at once, to need little memory beside the weight itself.
_ROWS = 1024


def checkpoint_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensor names, each with the slice of our (fused) tensor that holds it."""
    config = decoder.config
    yield from _named("model.embed_tokens", decoder.embed_tokens)
    for index, layer in enumerate(decoder.layers):
        for ours, module in layer.named_children():
            for kind, tensor in _named("", module):
                for theirs, part in split_module(config, ours, tensor):
                    yield f"model.layers.{index}.{theirs}{kind}", part
    yield from _named("model.norm", decoder.norm)
    if decoder.lm_head is not None and not config.tie_word_embeddings:
        yield from _named("lm_head", decoder.lm_head)


def split_module(config: ModelConfig, ours: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's modules in our (perhaps fused) module of a layer, each with its rows of `tensor`."""
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    splits = {
        "qkv_proj": [query, key_value, key_value],
        "gate_up_proj": [config.intermediate_size, config.intermediate_size],
    }
    parts = tensor.split(splits[ours]) if ours in splits else (tensor,)
    yield from zip(_MODULES[ours], parts, strict=True)


def is_of_int8(name: str, tensor: Tensor) -> bool:
    """Whether a tensor of `checkpoint_tensors` is an int8 matrix or its scales, whose dtypes are fixed."""
    return tensor.dtype is torch.int8 or name.endswith(_SCALE)


def _named(prefix: str, module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's weight, and perhaps its bias and its scales."""
    for kind, tensor in (*module.named_parameters(), *module.named_buffers()):
        yield f"{prefix}.{kind}", tensor


@torch.no_grad()
def store(stored: StoredTensor, targets: Mapping[str, Tensor], *, is_quantised: bool) -> set[str]:
    """Write a tensor of the checkpoint into its target, quantising it if that is int8 and it is not.

    Args:
        stored: what the checkpoint has.
        targets: by the checkpoint's names; written to.
        is_quantised: whether the checkpoint says that its matrices are int8.

    Returns:
        The names of the targets that are now filled: its own, and perhaps that of its scales.

    Raises:
        ModelError: the model has no such tensor, or one of another shape or kind.
    """
    name, value = stored.name, stored.value
    target = targets.get(name)
    if target is None:
        raise ModelError(f"{stored.file} holds {name}, which a model of this config does not have")
    if value.shape != target.shape:
        raise ModelError(
            f"{stored.file}: {name} is {list(value.shape)}, but config.json asks for {list(target.shape)}"
        )
    wanted = tuple(DTYPES.values())
    if is_quantised and target.dtype is torch.int8:
        wanted = (torch.int8,)
    elif is_quantised and name.endswith(_SCALE):
        wanted = (torch.float32,)
    if value.dtype not in wanted:
        raise ModelError(
            f"{stored.file}: {name} is stored as {str(value.dtype).removeprefix('torch.')}",
            hint="quantise the model again with `tessera quantize`"
            if is_quantised
            else "use weights stored as " + ", ".join(DTYPES),
        )
    if target.dtype is not torch.int8 or is_quantised:
        target.copy_(value)
        return {name}
    scales = targets[name + _SCALE]
    try:
        for start in range(0, len(value), _ROWS):
            rows = slice(start, start + _ROWS)
            weight = Int8Weight.quantise(value[rows])
            target[rows], scales[rows] = weight.values, weight.scales
    except ValueError as error:
        raise ModelError(f"{stored.file}: {name}: {error}", hint="the model may be damaged") from error
    return {name, name + _SCALE}
