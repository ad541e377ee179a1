"""What a recipe may say about the teacher's cache."""

from typing import Any, Literal

from pydantic import field_validator
from pydantic_core.core_schema import ValidationInfo

from tessera_cli.recipe.section import PositiveInt, Section, Text, problem

CacheKind = Literal["none", "hidden", "topk", "sample"]

# The keys that one kind alone has, with their defaults.
_KEYS: dict[str, tuple[CacheKind, Any]] = {
    "dtype": ("hidden", "float16"),
    "k": ("topk", 64),
    "num_samples": ("sample", 50),
}


class TeacherCacheSection(Section):
    """The teacher's side of the loss, computed once and read from disk in every later run."""

    kind: CacheKind = "none"
    """Hidden states (exact), the k likeliest tokens, or drawn tokens; none runs the teacher in every step."""
    dtype: Literal["float16", "float32"] | None = None
    """The type of hidden states on disk (float16); float32 trains to the very bits of an uncached run."""
    k: PositiveInt | None = None
    """Tokens kept by topk (64); all others share one bucket."""
    num_samples: PositiveInt | None = None
    """Tokens drawn at each position by sample (50)."""
    path: Text | None = None
    """Its directory, relative to the recipe, or to the working directory when given on the command line; null
    is one of Tessera's own, named after what it depends on."""

    @field_validator("dtype", "k", "num_samples")
    @classmethod
    def _of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        kind, default = _KEYS[str(info.field_name)]
        ours = info.data.get("kind")
        if ours is None or ours == kind:
            return default if value is None else value
        if value is not None:
            raise problem(f"only `kind: {kind}` has it, and this one is {ours}")
        return None

    @field_validator("path")
    @classmethod
    def _path(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        if info.data.get("kind") == "none":
            raise problem("`kind: none` keeps nothing")
        return value
