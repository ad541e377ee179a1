"""A narrower student: the teacher's most active channels, neurons and heads, sliced out of its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from tessera_cli.distill.students.activation_importance import ActivationImportance
from tessera_cli.errors import UsageError
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder

Rows = Tensor | None  # what to take of a dimension; None: all of it


@dataclass(frozen=True)
class WidthChoice:
    """What a student keeps of its teacher, by number, in increasing order.

    `hidden` are channels of the hidden state, the same in all layers: the residual ties them. The other three
    have an entry for each of `layers`. A key-value head keeps equally many of its query heads in all layers.
    """

    layers: tuple[int, ...]
    hidden: tuple[int, ...]
    neurons: tuple[tuple[int, ...], ...]
    heads: tuple[tuple[int, ...], ...]
    kv_heads: tuple[tuple[int, ...], ...]


def width_as_json(choice: WidthChoice) -> str:
    """What `read_width` reads back equal."""
    return TypeAdapter(WidthChoice).dump_json(choice).decode() + "\n"


def read_width(path: Path) -> WidthChoice:
    """The choice that a run recorded.

    Raises:
        UsageError: the file is not there or not one.
    """
    try:
        return TypeAdapter(WidthChoice).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UsageError(
            f"{path} cannot be read: it says what the student kept", hint="start a new run"
        ) from error


def choose_width(
    importance: ActivationImportance, layers: Sequence[int], teacher: ModelConfig, student: ModelConfig
) -> WidthChoice:
    """The most important parts that `student` has room for; of equals the earlier ones."""
    chosen = [_choose_heads(importance.heads[layer], teacher, student) for layer in layers]
    return WidthChoice(
        layers=tuple(layers),
        hidden=_top(importance.hidden, student.hidden_size),
        neurons=tuple(_top(importance.neurons[layer], student.intermediate_size) for layer in layers),
        heads=tuple(heads for heads, _ in chosen),
        kv_heads=tuple(kv_heads for _, kv_heads in chosen),
    )


def build_narrow_student(teacher: Decoder, choice: WidthChoice) -> Decoder:
    """A float32 decoder of what `choice` keeps; its tensors are copies. All of it is the teacher itself."""
    config = replace(
        teacher.config.with_layers(choice.layers),
        hidden_size=len(choice.hidden),
        intermediate_size=len(choice.neurons[0]),
        num_attention_heads=len(choice.heads[0]),
        num_key_value_heads=len(choice.kv_heads[0]),
    )
    device = teacher.head_weight.device
    student = Decoder(config, dtype=torch.float32, device=device)
    source = teacher.state_dict()
    hidden = torch.tensor(choice.hidden, device=device)
    slices = [_layer_slices(teacher.config, choice, place, hidden) for place in range(len(choice.layers))]
    outside: dict[str, tuple[Rows, Rows]] = {
        "embed_tokens": (None, hidden),
        "norm": (hidden, None),
        "lm_head": (None, hidden),
    }
    with torch.no_grad():
        for name, target in student.state_dict().items():
            *prefix, module, _ = name.split(".")
            if prefix:
                place = int(prefix[1])
                name = name.replace(f"layers.{place}.", f"layers.{choice.layers[place]}.", 1)
                rows, columns = slices[place][module]
            else:
                rows, columns = outside[module]
            target.copy_(_take(source[name], rows, columns))
    return student


def _layer_slices(
    teacher: ModelConfig, choice: WidthChoice, place: int, hidden: Tensor
) -> dict[str, tuple[Rows, Rows]]:
    """What each module of a layer keeps of its outputs and of its inputs; norms have outputs only."""
    device = hidden.device
    neurons = torch.tensor(choice.neurons[place], device=device)
    within = torch.arange(teacher.head_dim, device=device)

    def elements(heads: Sequence[int]) -> Tensor:
        starts = torch.tensor(heads, device=device) * teacher.head_dim
        return (starts[:, None] + within).flatten()

    query, key_value = elements(choice.heads[place]), elements(choice.kv_heads[place])
    keys = teacher.num_attention_heads * teacher.head_dim
    values = keys + teacher.num_key_value_heads * teacher.head_dim
    whole_projection = teacher.qk_norm == "projection"
    return {
        "qkv_proj": (torch.cat([query, keys + key_value, values + key_value]), hidden),
        "q_norm": (query if whole_projection else None, None),
        "k_norm": (key_value if whole_projection else None, None),
        "o_proj": (hidden, query),
        "gate_up_proj": (torch.cat([neurons, teacher.intermediate_size + neurons]), hidden),
        "down_proj": (hidden, neurons),
        "input_layernorm": (hidden, None),
        "post_attention_layernorm": (hidden, None),
        "post_feedforward_layernorm": (hidden, None),
    }


def _take(tensor: Tensor, rows: Rows, columns: Rows) -> Tensor:
    if rows is not None:
        tensor = tensor.index_select(0, rows)
    # A bias has the outputs of its matrix and no inputs.
    return tensor if columns is None or tensor.ndim == 1 else tensor.index_select(1, columns)


def _choose_heads(
    scores: Tensor, teacher: ModelConfig, student: ModelConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query and key-value heads: the groups of the highest summed score, in each its best query heads."""
    grouped = scores.view(teacher.num_key_value_heads, -1)
    group_size = student.num_attention_heads // student.num_key_value_heads
    kv_heads = _top(grouped.sum(1), student.num_key_value_heads)
    heads = [kv * grouped.shape[1] + head for kv in kv_heads for head in _top(grouped[kv], group_size)]
    return tuple(heads), kv_heads


def _top(scores: Tensor, count: int) -> tuple[int, ...]:
    ranked: list[int] = torch.sort(scores, descending=True, stable=True).indices[:count].tolist()
    return tuple(sorted(ranked))
