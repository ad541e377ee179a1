"""What every section of a recipe is made of."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError


def _not_bool(value: Any) -> Any:
    # Python counts True as 1; in a recipe it is never a number.
    if isinstance(value, bool):
        raise PydanticCustomError("bool_as_number", "a flag is not a number")
    return value


Number = BeforeValidator(_not_bool)
NonNegativeInt = Annotated[int, Field(ge=0), Number]
PositiveInt = Annotated[int, Field(ge=1), Number]
PositiveFloat = Annotated[float, Field(gt=0), Number]
NonNegativeFloat = Annotated[float, Field(ge=0), Number]
Text = Annotated[str, Field(min_length=1)]


def problem(message: str) -> PydanticCustomError:
    """What a validator raises: `message` is told as it is."""
    return PydanticCustomError("recipe", "{message}", {"message": message})


class Section(BaseModel):
    """A mapping of a recipe; unknown keys are errors and nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )
