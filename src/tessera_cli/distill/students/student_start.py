"""The student's first weights: what the documents decide about them, and building them."""

from dataclasses import dataclass

import torch
from torch import nn

from tessera_cli.distill.data.corpus import TrainBatch, build_batch
from tessera_cli.distill.inputs import RunInputs
from tessera_cli.distill.students.activation_importance import activation_importance
from tessera_cli.distill.students.layer_choice import important_layers
from tessera_cli.distill.students.student import build_student, layer_importance
from tessera_cli.distill.students.student_config import StudentShape
from tessera_cli.distill.students.width_pruning import WidthChoice, build_narrow_student, choose_width
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.vocabulary import load_first_rows

CALIBRATION_TOKENS = 4_096


@dataclass(frozen=True)
class StudentStart:
    """What was decided: the teacher's `layers`, () for a student of none, and what is kept of their width."""

    layers: tuple[int, ...]
    width: WidthChoice | None


def decide_start(teacher: Decoder, inputs: RunInputs) -> StudentStart:
    """Whatever importance has to decide, judged on the documents of the first steps of the run."""
    shape = inputs.student
    layers = shape.layers
    if layers is None:
        importance = layer_importance(teacher, _calibration_batches(inputs))
        layers = tuple(important_layers(importance, shape.config.num_hidden_layers))
    if inputs.recipe.student.init != "width":
        return StudentStart(layers, None)
    activity = activation_importance(teacher, _calibration_batches(inputs))
    return StudentStart(layers, choose_width(activity, layers, teacher.config, shape.config))


def start_student(teacher: Decoder, shape: StudentShape, start: StudentStart, *, seed: int) -> Decoder:
    """The untrained student in float32, on the teacher's device; `seed` is that of random weights."""
    device = teacher.head_weight.device
    if start.width is not None:
        return build_narrow_student(teacher, start.width)
    if start.layers:
        return build_student(teacher, start.layers)
    if shape.path is not None:
        return load_first_rows(shape.path, shape.config.vocab_size, dtype=torch.float32, device=device)
    return random_decoder(shape.config, seed=seed).to(device)


@torch.no_grad()
def random_decoder(config: ModelConfig, *, seed: int) -> Decoder:
    """A float32 decoder with GPT-2's first weights: matrices normal with a deviation of 0.02, or of
    0.02 / √(2 layers) where they add to the residual, norms one and biases zero.
    """
    decoder = Decoder(config)
    generator = torch.Generator().manual_seed(seed)
    residual = 0.02 / (2 * config.num_hidden_layers) ** 0.5
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 1:
            nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        else:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0.0, residual if adds else 0.02, generator=generator)
    return decoder


def _calibration_batches(inputs: RunInputs) -> list[TrainBatch]:
    micro_batches = (micro_batch for step in inputs.step_documents() for micro_batch in step)
    batches: list[TrainBatch] = []
    num_tokens = 0
    for micro_batch in micro_batches:
        if num_tokens >= CALIBRATION_TOKENS:
            break
        batches.append(build_batch(micro_batch))
        num_tokens += len(batches[-1].input_ids)
    return batches
