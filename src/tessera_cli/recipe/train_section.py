"""What a recipe says of the optimisation and of what is kept to resume it."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tessera_cli.recipe.section import (
    NonNegativeFloat,
    Number,
    PositiveFloat,
    PositiveInt,
    Section,
    problem,
)


class TrainSection(Section):
    """How the student is optimised, by AdamW."""

    max_tokens: PositiveInt | None = None
    """Stop after this many tokens through the student. Exactly one of the three lengths is set."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimiser steps."""
    num_epochs: PositiveInt | None = None
    """Stop after this many passes over the training files."""
    micro_batch_size: PositiveInt = 4
    """Rows in one forward and backward pass."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches in an optimiser step."""
    learning_rate: PositiveFloat = 3e-4
    """The peak, after warm-up."""
    lr_scheduler: Literal["cosine", "linear", "constant"] = "cosine"
    """The shape after warm-up; cosine and linear fall to zero."""
    warmup_ratio: Annotated[float, Field(ge=0, lt=1), Number] = 0.03
    """The share of the steps in which the learning rate rises from zero."""
    weight_decay: NonNegativeFloat = 0.1
    """AdamW's, on matrices only."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this norm."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The type of the student's arithmetic; its master weights are float32."""
    loss_chunk_tokens: PositiveInt = 256
    """Supervised tokens whose logits are in memory at once."""

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        lengths = ("max_tokens", "max_steps", "num_epochs")
        given = [name for name in lengths if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"got {' and '.join(given)}; set the others to null" if given else "got none"
            raise problem(f"expected exactly one of {', '.join(lengths)}, {found}")
        return self


class CheckpointSection(Section):
    """What is kept to resume from."""

    every: PositiveInt = 200
    """Steps between checkpoints."""
    keep: PositiveInt = 2
    """How many of the latest are kept."""
