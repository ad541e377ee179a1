"""What a recipe comes to, told before any weight is loaded."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tessera_cli.distill.data.on_policy_steps import answering_engine, count_on_policy_steps
from tessera_cli.distill.inputs import RunInputs, read_inputs
from tessera_cli.distill.teacher_cache.cost import CacheCost, cache_cost
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.source import Notify
from tessera_cli.recipe.loader import LoadedRecipe
from tessera_cli.recipe.schema import Recipe

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class ModelFigures:
    """One model of the plan; sizes in bytes, `gflop_per_token` of a forward pass, attention not counted."""

    num_parameters: int
    num_hidden_layers: int
    gflop_per_token: float
    kv_bytes_per_token: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that training needs besides activations.

    `student` is float32 weights, gradients and both AdamW moments (16 bytes a parameter), of the projections
    that a loss of hidden states learns as well; `loss` the logits of one chunk, of both models and in
    float32, with the buffers of the same size that the loss works in; `answers` the KV cache in which the
    student answers prompts while it trains.
    """

    teacher: int
    student: int
    loss: int
    answers: int

    @property
    def total(self) -> int:
        return self.teacher + self.student + self.loss + self.answers


@dataclass(frozen=True)
class Plan:
    """A run before it runs.

    `layers` are the teacher's layers that the student starts with, None where their importance decides at
    the start of the run, () where it starts with none of them. KV bytes are those of the stored dtype, the
    student's as it is exported. `gflop_per_token` is a training step's: 6 FLOP per multiplied parameter of
    the student, 2 of the teacher or of as much of it as a cache leaves to do. Documents count as they are in
    the files, also in the `num_on_policy_steps` that train on the student's answers to their prompts.
    `num_eval_trained_on` of the held-out documents are documents to train on as well.
    `is_estimate` tells that only the beginning of a very long run was counted. `notes` say what is left out.
    """

    name: str
    teacher_path: Path
    teacher: ModelFigures
    student: ModelFigures
    layers: tuple[int, ...] | None
    num_documents: int
    num_eval_documents: int
    num_too_long: int
    num_eval_trained_on: int
    num_steps: int
    num_tokens: int
    num_supervised_tokens: int
    num_epochs: float
    num_on_policy_steps: int
    is_estimate: bool
    gflop_per_token: float
    memory: MemoryEstimate
    cache: CacheCost | None
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the same names, for JSON."""
        values = asdict(self) | {"teacher_path": str(self.teacher_path)}
        values["memory"]["total"] = self.memory.total
        return values


def plan_recipe(recipe: LoadedRecipe, *, home: Path, offline: bool, notify: Notify | None = None) -> Plan:
    """Find the teacher, tokenise the documents and count; no weights and no torch.

    Only a GGUF teacher that was never used before is converted first; `notify` hears of it.

    Raises:
        UsageError: whatever would stop the run before its first step.
    """
    inputs = read_inputs(recipe.recipe, home=home, offline=offline, notify=notify, estimate=True)
    teacher, student = inputs.teacher.config, inputs.student.config
    exported = teacher.dtype if inputs.recipe.export.dtype == "auto" else inputs.recipe.export.dtype
    return Plan(
        name=inputs.recipe.name,
        teacher_path=inputs.teacher.path,
        teacher=_figures(teacher),
        student=_figures(replace(student, dtype=exported)),
        layers=inputs.student.layers,
        num_documents=len(inputs.train.lengths),
        num_eval_documents=len(inputs.eval.documents),
        num_too_long=inputs.train.intake.num_too_long + inputs.eval.intake.num_too_long,
        num_eval_trained_on=len(inputs.trained_on),
        num_steps=inputs.steps.num_steps,
        num_tokens=inputs.steps.num_tokens,
        num_supervised_tokens=inputs.steps.num_supervised_tokens,
        num_epochs=inputs.steps.num_epochs,
        num_on_policy_steps=_on_policy_steps(inputs),
        is_estimate=inputs.steps.is_estimate,
        gflop_per_token=(3 * student.flops_per_token() + _teacher_flops(inputs)) / 1e9,
        memory=_memory(inputs.recipe, teacher, student),
        cache=cache_cost(inputs),
        notes=inputs.notes,
    )


def _figures(config: ModelConfig) -> ModelFigures:
    return ModelFigures(
        num_parameters=config.num_parameters,
        num_hidden_layers=config.num_hidden_layers,
        gflop_per_token=config.flops_per_token() / 1e9,
        kv_bytes_per_token=config.kv_bytes_per_token(_BYTES[config.dtype]),
    )


def _teacher_flops(inputs: RunInputs) -> int:
    """The teacher's part of a training step, for each token."""
    kind, teacher = inputs.recipe.teacher.cache.kind, inputs.teacher.config
    if kind == "none":
        return teacher.flops_per_token()
    # Hidden states leave the head to do, other kinds nothing.
    return 2 * teacher.hidden_size * inputs.student.config.vocab_size if kind == "hidden" else 0


def _memory(recipe: Recipe, teacher: ModelConfig, student: ModelConfig) -> MemoryEstimate:
    # The loss holds logits and log-probabilities of teacher and student, 4 bytes each, and the head's
    # gradient.
    chunk = 4 * 4 * recipe.train.loss_chunk_tokens * student.vocab_size
    head_gradient = 4 * student.vocab_size * student.hidden_size
    # "auto" is float32 on a CPU: the larger of what it can come to.
    teacher_bytes = 4 if recipe.teacher.dtype == "auto" else _BYTES[recipe.teacher.dtype]
    # Beside a cache there are the embedding, the final norm and the head.
    cached_layers = 0 if recipe.teacher.cache.kind == "none" else teacher.num_hidden_layers
    return MemoryEstimate(
        teacher=teacher_bytes * (teacher.num_parameters - cached_layers * teacher.num_layer_parameters),
        student=16 * (student.num_parameters + _projection_parameters(recipe, teacher, student)),
        loss=chunk + head_gradient,
        answers=_answer_bytes(recipe, student),
    )


def _answer_bytes(recipe: Recipe, student: ModelConfig) -> int:
    section = recipe.data.on_policy
    if section is None:
        return 0
    sizes = answering_engine(recipe.data, section)
    # Like the student's master weights, its keys and values are float32.
    return sizes.num_blocks * sizes.block_size * student.kv_bytes_per_token(_BYTES["float32"])


def _on_policy_steps(inputs: RunInputs) -> int:
    section = inputs.recipe.data.on_policy
    if section is None:
        return 0
    steps, seed = inputs.steps, inputs.recipe.seed
    return count_on_policy_steps(steps.num_steps, section, seed, estimate=steps.is_estimate)


def _projection_parameters(recipe: Recipe, teacher: ModelConfig, student: ModelConfig) -> int:
    pairs = recipe.loss.hidden.pairs
    if pairs is None or student.hidden_size == teacher.hidden_size:
        return 0
    num_pairs = student.num_hidden_layers if pairs == "even" else len(pairs)
    return num_pairs * student.hidden_size * teacher.hidden_size
