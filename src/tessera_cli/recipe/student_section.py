"""What a recipe may say of the student."""

from typing import Any, Literal, Self

from pydantic import field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from tessera_cli.recipe.section import NonNegativeInt, PositiveInt, Section, Text, problem

_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_KEYS: dict[str, tuple[str, ...]] = {
    "teacher_layers": ("layers", "num_hidden_layers"),
    "width": ("layers", "num_hidden_layers", *_WIDTHS),
    "config": ("model", "num_hidden_layers", *_WIDTHS),
    "checkpoint": ("model",),
}


class StudentSection(Section):
    """The model to train: cut from the teacher, new, or one that exists."""

    init: Literal["teacher_layers", "width", "config", "checkpoint"] = "teacher_layers"
    """Where the first weights come from: teacher_layers are some of the teacher's layers with its embeddings
    and head; width narrows layers to the channels, neurons and heads that are most active; config are random
    ones; checkpoint are those of a model."""
    model: Text | None = None
    """The model of `init: checkpoint`; for `init: config` a directory with the config.json to start from
    instead of the teacher's."""
    layers: Literal["even", "importance"] | list[NonNegativeInt] | None = None
    """Which teacher layers: evenly spread, the ones that change the hidden state most, or a list, from 0.
    The default is even for teacher_layers and all of them for width."""
    num_hidden_layers: PositiveInt | None = None
    """How many layers; required with `layers: even` and `layers: importance`."""
    hidden_size: PositiveInt | None = None
    """Channels of the hidden state; like the keys below the teacher's where not given."""
    intermediate_size: PositiveInt | None = None
    """Neurons of an MLP."""
    num_attention_heads: PositiveInt | None = None
    """Query heads; alone, a multiple of those that share one key-value head."""
    num_key_value_heads: PositiveInt | None = None
    """Key-value heads; alone, each with all of its query heads."""

    @field_validator("model", "num_hidden_layers", *_WIDTHS)
    @classmethod
    def _belongs(cls, value: Any, info: ValidationInfo) -> Any:
        init = info.data.get("init")
        if init is not None and value is not None and info.field_name not in _KEYS[init]:
            raise problem(f"`init: {init}` has no use for it, only for {', '.join(_KEYS[init])}")
        if init == "checkpoint" and value is None and info.field_name == "model":
            raise problem("required with `init: checkpoint`")
        return value

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None:
            return "even" if info.data.get("init") == "teacher_layers" else None
        if isinstance(value, list):
            if not value or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
                raise problem(f"expected layer numbers from 0, got {value}")
            if sorted(set(value)) != value:
                raise problem(f"layer numbers must increase, got {value}")
        elif value not in ("even", "importance"):
            raise problem(f'expected "even", "importance" or a list of layer numbers, got {value!r}')
        return cls._belongs(value, info)

    @field_validator("num_hidden_layers")
    @classmethod
    def _num_hidden_layers(cls, value: int | None, info: ValidationInfo) -> int | None:
        layers = info.data.get("layers")
        if isinstance(layers, str) and value is None:
            raise problem(f"required with `layers: {layers}`")
        if isinstance(layers, list) and value not in (None, len(layers)):
            raise problem(f"{value} disagrees with the {len(layers)} layers listed in `layers`")
        if (
            info.data.get("init") == "width"
            and "layers" in info.data
            and layers is None
            and value is not None
        ):
            raise problem("needs `layers: even` or `layers: importance`")
        return value

    @model_validator(mode="after")
    def _some_width(self) -> Self:
        if self.init == "width" and all(getattr(self, name) is None for name in _WIDTHS):
            raise problem(f"`init: width` needs one of {', '.join(_WIDTHS)}")
        return self
