"""What a recipe says of measuring the student and of writing it."""

from typing import Literal

from tessera_cli.recipe.section import NonNegativeInt, PositiveInt, Section


class EvalSection(Section):
    """How the student is measured while it trains."""

    every: PositiveInt = 100
    """Steps between evaluations."""
    max_tokens: PositiveInt = 65536
    """Supervised held-out tokens in an evaluation, at most; whole documents, at least one."""
    samples: NonNegativeInt = 3
    """Held-out prompts that the student continues for the report."""


class ExportSection(Section):
    """How the finished student is written."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of the stored weights; auto is the teacher's."""
    weights: Literal["last", "best"] = "last"
    """Those of the last step, or of the evaluation with the lowest held-out KL, whose checkpoint is kept."""
