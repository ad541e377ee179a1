"""What a recipe may say of the hidden states that the student is to share with its teacher."""

from typing import Any, Literal

from pydantic import field_validator
from pydantic_core.core_schema import ValidationInfo

from tessera_cli.recipe.section import PositiveFloat, Section, problem


class HiddenLossSection(Section):
    """A loss between the outputs of layers, added as weight x the mean over pairs of layers."""

    kind: Literal["none", "mse", "cosine"] = "none"
    """The mean square of the difference over channels, 1 - cosine, or no such loss."""
    weight: PositiveFloat | None = None
    """Its weight beside kd_weight and ce_weight (1)."""
    pairs: Literal["even"] | list[list[int]] | None = None
    """[student layer, teacher layer] pairs, from 0; even pairs each student layer, the last with the last."""

    @field_validator("weight", "pairs", mode="before")
    @classmethod
    def _of_a_kind(cls, value: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("kind")
        if kind == "none" and value is not None:
            raise problem("`kind: none` has no use for it")
        if value is None and kind not in (None, "none"):
            return {"weight": 1.0, "pairs": "even"}[str(info.field_name)]
        return value

    @field_validator("pairs", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        if value in (None, "even"):
            return value
        if not isinstance(value, list) or not value or not all(_is_pair(pair) for pair in value):
            raise problem(f'expected "even" or a list of [student layer, teacher layer], got {value!r}')
        if len({tuple(pair) for pair in value}) < len(value):
            raise problem("names a pair twice")
        return value


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(i) is int and i >= 0 for i in value)
