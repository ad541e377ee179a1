"""What a recipe may say: strict, frozen models; every key, its type, its bounds and its default."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core.core_schema import ValidationInfo

from tessera_cli.recipe.cache_section import TeacherCacheSection
from tessera_cli.recipe.data_section import DataSection
from tessera_cli.recipe.eval_section import EvalSection, ExportSection
from tessera_cli.recipe.hidden_section import HiddenLossSection
from tessera_cli.recipe.section import (
    NonNegativeFloat,
    Number,
    Section,
    Text,
    problem,
)
from tessera_cli.recipe.student_section import StudentSection
from tessera_cli.recipe.train_section import CheckpointSection, TrainSection

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

TeacherDtype = Literal["auto", "float32", "bfloat16", "float16"]
LossKind = Literal["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd"]

# The skew kinds mix a tenth of the divergence's first argument into its second (DistiLLM, arXiv 2402.03898).
DEFAULT_MIXTURE_WEIGHT: dict[str, float] = {"jsd": 0.5, "skew_kl": 0.1, "skew_reverse_kl": 0.9}


class TeacherSection(Section):
    """The model to learn from."""

    model: Text
    """A model directory, a hub id, a .gguf file or package:IMPORT_NAME/FILE.gguf."""
    dtype: TeacherDtype = "auto"
    """The type its weights are computed in; auto is the stored one where the device is quick at it."""
    cache: TeacherCacheSection = TeacherCacheSection()
    """What is kept of the teacher between runs."""


class LossSection(Section):
    """What is minimised: kd_weight x T^2 x divergence(teacher, student at T) + ce_weight x cross-entropy."""

    kind: LossKind = "forward_kl"
    """The divergence."""
    temperature: Annotated[float, Field(ge=0.01, le=100), Number] = 1.0
    """T: divides the logits of both models in the divergence; beyond its bounds little is left to learn."""
    mixture_weight: Annotated[float, Field(gt=0, lt=1), Number] | None = None
    """The teacher's share in the mixture of jsd (0.5), skew_kl (0.1) or skew_reverse_kl (0.9)."""
    kd_weight: NonNegativeFloat = 1.0
    """Weight of the divergence."""
    ce_weight: NonNegativeFloat = 0.0
    """Weight of the cross-entropy against the data."""
    hidden: HiddenLossSection = HiddenLossSection()
    """What is added for the difference of hidden states."""

    @field_validator("mixture_weight")
    @classmethod
    def _mixture_weight(cls, value: float | None, info: ValidationInfo) -> float | None:
        kind = info.data.get("kind")
        if kind is None:
            return value
        if value is not None and kind not in DEFAULT_MIXTURE_WEIGHT:
            raise problem(f"`kind: {kind}` has no mixture, only {', '.join(DEFAULT_MIXTURE_WEIGHT)}")
        return DEFAULT_MIXTURE_WEIGHT.get(kind) if value is None else value

    @model_validator(mode="after")
    def _some_weight(self) -> Self:
        if self.kd_weight == self.ce_weight == 0 and self.hidden.kind == "none":
            raise problem("`kd_weight` and `ce_weight` are both 0, nothing would be learnt")
        return self


class Recipe(Section):
    """A distillation, complete."""

    name: Annotated[str, Field(pattern=f"^{NAME_PATTERN.pattern}$")]
    """Names the run directory: letters, digits, dots, dashes and underscores."""
    seed: Annotated[int, Field(ge=0, lt=2**63), Number] = 0
    """Fixes the order of the documents and every other random choice."""
    teacher: TeacherSection
    student: StudentSection
    data: DataSection
    loss: LossSection = LossSection()
    train: TrainSection
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    export: ExportSection = ExportSection()

    @field_validator("data")
    @classmethod
    def _data_that_the_cache_serves(cls, value: DataSection, info: ValidationInfo) -> DataSection:
        teacher = info.data.get("teacher")
        if teacher is None or teacher.cache.kind == "none":
            return value
        if value.on_policy is not None:
            raise problem(
                "the answers of `on_policy` are new in every run, no `teacher.cache` has them: "
                "leave one of the two out"
            )
        if value.streaming:
            raise problem("a `teacher.cache` needs all documents beforehand, `streaming` never has them")
        return value

    @field_validator("train")
    @classmethod
    def _way_that_the_data_go(cls, value: TrainSection, info: ValidationInfo) -> TrainSection:
        data = info.data.get("data")
        if data is not None and data.streaming and value.num_epochs is not None:
            raise problem("`data.streaming` needs max_tokens or max_steps: a stream has no known end")
        if data is not None and data.on_policy is not None and value.data_parallel == "fsdp2":
            raise problem("`data.on_policy` answers with whole weights, which fsdp2 shards: set ddp")
        return value

    @field_validator("loss")
    @classmethod
    def _loss_that_the_cache_serves(cls, value: LossSection, info: ValidationInfo) -> LossSection:
        teacher = info.data.get("teacher")
        if teacher is None:
            return value
        if teacher.cache.kind == "sample" and value.kind != "forward_kl":
            raise problem(
                "`teacher.cache.kind: sample` keeps no probabilities: only forward_kl can be learnt from it, "
                f"not {value.kind}"
            )
        if teacher.cache.kind != "none" and value.hidden.kind != "none":
            raise problem("`hidden` needs the teacher's layers, which no `teacher.cache` keeps")
        return value
