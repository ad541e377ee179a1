"""A student is a part of its teacher, in memory of its own."""

from pathlib import Path

import pytest
import torch

from tessera_cli.distill.data.corpus import Document, build_batch
from tessera_cli.distill.students.student import build_student, forward_batch, layer_importance
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder


@pytest.fixture(params=["tied", "untied"])
def teacher(request, tiny_model_dir: Path, tiny_untied_model_dir: Path) -> Decoder:
    path = tiny_model_dir if request.param == "tied" else tiny_untied_model_dir
    return load_decoder(path, dtype=torch.float32)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    documents = []
    for length in (5, 11, 3):
        ids = torch.randint(3, 200, (length,), generator=generator).numpy()
        documents.append(Document(ids.astype("int32"), ids > 0))
    for document in documents:
        document.supervised[0] = False
    return build_batch(documents)


@torch.no_grad()
def test_all_layers_are_the_teacher_itself(teacher, batch):
    student = build_student(teacher, [0, 1, 2])
    assert torch.equal(forward_batch(student, batch), forward_batch(teacher, batch))
    assert torch.equal(student.head_weight, teacher.head_weight)


@torch.no_grad()
def test_chosen_layers_are_those_of_a_teacher_that_skips_the_others(teacher, batch):
    student = build_student(teacher, [0, 2])
    teacher.layers[1].forward = lambda index, x, *_: x
    assert torch.equal(forward_batch(student, batch), forward_batch(teacher, batch))
    assert student.config.num_hidden_layers == 2
    assert sum(p.numel() for p in student.parameters()) == student.config.num_parameters


def test_training_the_student_never_touches_the_teacher(teacher):
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    student = build_student(teacher, [0, 2])
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.fill_(7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())


def test_a_half_precision_teacher_gives_a_float32_student(teacher):
    student = build_student(teacher.to(torch.bfloat16), [1])
    assert {parameter.dtype for parameter in student.parameters()} == {torch.float32}
    assert torch.equal(student.layers[0].down_proj.weight, teacher.layers[1].down_proj.weight.float())


def test_importance_is_one_minus_the_cosine_of_input_and_output(teacher, batch):
    # A layer that does nothing, and one that turns every hidden state around.
    teacher.layers[0].forward = lambda index, x, *_: 2 * x
    teacher.layers[1].forward = lambda index, x, *_: -x
    importance = layer_importance(teacher, [batch, batch])
    assert importance[0] == pytest.approx(0, abs=1e-6)
    assert importance[1] == pytest.approx(2, abs=1e-6)
    assert 0 < importance[2] < 2
    assert layer_importance(teacher, [batch]) == pytest.approx(importance)
    assert not teacher.layers[2]._forward_hooks
