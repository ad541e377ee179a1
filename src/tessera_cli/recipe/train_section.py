"""What a recipe says of the optimisation and of what is kept to resume it."""

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from tessera_cli.recipe.section import (
    NonNegativeFloat,
    Number,
    PositiveFloat,
    PositiveInt,
    Section,
    problem,
)

# A step is laid out as a whole: what is far beyond any use would first fill the memory.
MAX_STEP_ROWS = 2**20


class LoraSection(Section):
    """Low-rank adapters (arXiv 2106.09685) on the layers' products: W + alpha / r x B A."""

    r: PositiveInt = 16
    """Their rank."""
    alpha: PositiveInt = 32
    """Scales them, divided by r."""
    dropout: Annotated[float, Field(ge=0, lt=1), Number] = 0.0
    """The share of an adapter's inputs that is set to zero in training."""
    target_modules: list[Literal["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]] = Field(
        default=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    )
    """Which products get one; queries, keys and values are one product, and so are gate and up."""

    @field_validator("target_modules")
    @classmethod
    def _some_modules(cls, value: list[str]) -> list[str]:
        if not value or len(set(value)) < len(value):
            raise problem("expected one or more modules, each once")
        return value


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
    """Micro-batches in an optimiser step, of no more than a million rows together."""
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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of the student's arithmetic; its master weights are float32. With float16 the loss is scaled,
    and a step whose gradients overflow is left out."""
    loss_chunk_tokens: PositiveInt = 256
    """Supervised tokens whose logits are in memory at once."""
    gradient_checkpointing: StrictBool = False
    """Compute each layer again in the backward pass instead of keeping what it computed: less memory."""
    compile: StrictBool = False
    """Compile the student's layers with torch.compile, at the first step."""
    data_parallel: Literal["ddp", "fsdp2"] = "ddp"
    """How several processes hold the student: whole in each, or sharded over all of them."""
    ema_decay: Annotated[float, Field(gt=0, lt=1), Number] | None = None
    """Measure and export the weights' exponential moving average, of which each step keeps this share."""
    early_stop_patience: PositiveInt | None = None
    """Stop after this many evaluations without a new lowest held-out KL."""
    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = Field(default=[])
    """Where figures go besides metrics.jsonl."""
    lora: LoraSection | None = None
    """Train low-rank adapters instead of the weights; they are merged into the exported student."""

    @field_validator("gradient_accumulation_steps")
    @classmethod
    def _step_of_some_size(cls, value: int, info: ValidationInfo) -> int:
        rows = value * int(info.data.get("micro_batch_size") or 1)
        if rows > MAX_STEP_ROWS:
            raise problem(f"a step of {rows:,} rows is too large: no more than {MAX_STEP_ROWS:,}")
        return value

    @field_validator("trackers")
    @classmethod
    def _different_trackers(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise problem("names a tracker twice")
        return value

    @field_validator("lora")
    @classmethod
    def _whole_adapters(cls, value: LoraSection | None, info: ValidationInfo) -> LoraSection | None:
        if value is not None and info.data.get("data_parallel") == "fsdp2":
            raise problem("`data_parallel: fsdp2` shards whole weights only, adapters need ddp")
        return value

    @field_validator("data_parallel")
    @classmethod
    def _shardable(cls, value: str, info: ValidationInfo) -> str:
        if value == "fsdp2" and info.data.get("dtype") == "float16":
            raise problem("fsdp2 does not go with `dtype: float16`, only with bfloat16 and float32")
        if value == "fsdp2" and info.data.get("compile"):
            raise problem("fsdp2 does not go with `compile: true`")
        return value

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
