"""What a recipe may say: strict, frozen models; every key, its type, its bounds and its default."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo


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

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

TeacherDtype = Literal["auto", "float32", "bfloat16", "float16"]
LossKind = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd"]

# The skew kinds mix a tenth of the divergence's first argument into its second (DistiLLM, arXiv 2402.03898).
DEFAULT_MIXTURE_WEIGHT: dict[str, float] = {"jsd": 0.5, "skew_kl": 0.1, "skew_reverse_kl": 0.9}


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("recipe", "{message}", {"message": message})


class Section(BaseModel):
    """A mapping of a recipe; unknown keys are errors and nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )


class TeacherSection(Section):
    """The model to learn from."""

    model: Text
    """A model directory, a hub id, a .gguf file or package:IMPORT_NAME/FILE.gguf."""
    dtype: TeacherDtype = "auto"
    """The type its weights are computed in; auto is the stored one where the device is quick at it."""


class StudentSection(Section):
    """The model to train, cut from the teacher."""

    init: Literal["teacher_layers"] = "teacher_layers"
    """Where the first weights come from: some of the teacher's layers, its embeddings and its head."""
    layers: Literal["even", "importance"] | list[NonNegativeInt] = "even"
    """Which teacher layers: evenly spread, the ones that change the hidden state most, or a list, from 0."""
    num_hidden_layers: PositiveInt | None = None
    """How many layers; required unless `layers` is a list."""

    @field_validator("layers", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        if isinstance(value, list):
            if not value or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
                raise _problem(f"expected layer numbers from 0, got {value}")
            if sorted(set(value)) != value:
                raise _problem(f"layer numbers must increase, got {value}")
        elif value not in ("even", "importance"):
            raise _problem(f'expected "even", "importance" or a list of layer numbers, got {value!r}')
        return value

    @field_validator("num_hidden_layers")
    @classmethod
    def _num_hidden_layers(cls, value: int | None, info: ValidationInfo) -> int | None:
        layers = info.data.get("layers")
        if isinstance(layers, str) and value is None:
            raise _problem(f"required with `layers: {layers}`")
        if isinstance(layers, list) and value not in (None, len(layers)):
            raise _problem(f"{value} disagrees with the {len(layers)} layers listed in `layers`")
        return value


class DataSource(Section):
    """One file of documents."""

    path: Text
    """The file; relative to the recipe, or to the working directory when given on the command line."""
    format: Literal["text", "messages", "prompt_completion"]
    """What a document looks like."""


class DataSection(Section):
    """The documents to train on and the held-out ones to measure on."""

    train: Annotated[list[DataSource], Field(min_length=1)]
    """Files to train on."""
    eval: Annotated[list[DataSource], Field(min_length=1)]
    """Held-out files."""
    max_seq_len: Annotated[int, Field(ge=2), Number] = 1024
    """Tokens in a row; a longer document is skipped and counted."""
    packing: StrictBool = True
    """Whether a row holds as many whole documents as fit, or one."""
    train_on: Literal["completion", "all"] = "completion"
    """Which tokens carry the loss: those of the answers, or all."""


class LossSection(Section):
    """What is minimised: kd_weight x T^2 x divergence(teacher, student at T) + ce_weight x cross-entropy."""

    kind: LossKind = "forward_kl"
    """The divergence."""
    temperature: PositiveFloat = 1.0
    """T: divides the logits of both models in the divergence."""
    mixture_weight: Annotated[float, Field(gt=0, lt=1), Number] | None = None
    """The teacher's share in the mixture of jsd (0.5), skew_kl (0.1) or skew_reverse_kl (0.9)."""
    kd_weight: NonNegativeFloat = 1.0
    """Weight of the divergence."""
    ce_weight: NonNegativeFloat = 0.0
    """Weight of the cross-entropy against the data."""

    @field_validator("mixture_weight")
    @classmethod
    def _mixture_weight(cls, value: float | None, info: ValidationInfo) -> float | None:
        kind = info.data.get("kind")
        if kind is None:
            return value
        if value is not None and kind not in DEFAULT_MIXTURE_WEIGHT:
            raise _problem(f"`kind: {kind}` has no mixture, only {', '.join(DEFAULT_MIXTURE_WEIGHT)}")
        return DEFAULT_MIXTURE_WEIGHT.get(kind) if value is None else value

    @field_validator("ce_weight")
    @classmethod
    def _some_weight(cls, value: float, info: ValidationInfo) -> float:
        if value == 0 and info.data.get("kd_weight") == 0:
            raise _problem("`kd_weight` and `ce_weight` are both 0, nothing would be learnt")
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
            raise _problem(f"expected exactly one of {', '.join(lengths)}, {found}")
        return self


class EvalSection(Section):
    """How the student is measured while it trains."""

    every: PositiveInt = 100
    """Steps between evaluations."""
    max_tokens: PositiveInt = 65536
    """Supervised held-out tokens in an evaluation, at most; whole documents, at least one."""
    samples: NonNegativeInt = 3
    """Held-out prompts that the student continues for the report."""


class CheckpointSection(Section):
    """What is kept to resume from."""

    every: PositiveInt = 200
    """Steps between checkpoints."""
    keep: PositiveInt = 2
    """How many of the latest are kept."""


class ExportSection(Section):
    """How the finished student is written."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of the stored weights; auto is the teacher's."""


class Recipe(Section):
    """A distillation, complete."""

    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN.pattern}$")]
    """Names the run directory: letters, digits, dots, dashes and underscores."""
    seed: NonNegativeInt = 0
    """Fixes the order of the documents and every other random choice."""
    teacher: TeacherSection
    student: StudentSection
    data: DataSection
    loss: LossSection = LossSection()
    train: TrainSection
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    export: ExportSection = ExportSection()
