"""A narrowed student keeps whole parts of its teacher, and all of them are the teacher itself."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera_cli.distill.data.corpus import TrainBatch, build_batch
from tessera_cli.distill.students.activation_importance import ActivationImportance, activation_importance
from tessera_cli.distill.students.student import forward_batch
from tessera_cli.distill.students.width_pruning import (
    WidthChoice,
    build_narrow_student,
    choose_width,
    read_width,
    width_as_json,
)
from tessera_cli.errors import UsageError
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder, save_decoder
from tessera_cli.models.operators import TorchOperators
from tests.families import NATIVE, plain_attend, random_tokens, transformers_model, write_family
from tests.training_factories import make_decoder, make_documents

SIZES = {"hidden_size": 48, "intermediate_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def batch() -> TrainBatch:
    return build_batch(make_documents([9, 4, 6]))


def _logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    attend = plain_attend(decoder.attention_layers)
    return decoder.logits(decoder(token_ids, torch.arange(len(token_ids)), attend))


def _narrow(teacher: Decoder, batch: TrainBatch, layers: list[int], **sizes: int) -> Decoder:
    importance = activation_importance(teacher, [batch])
    shape = replace(teacher.config.with_layers(layers), **sizes)
    return build_narrow_student(teacher, choose_width(importance, layers, teacher.config, shape))


@pytest.mark.parametrize("family", NATIVE)
@torch.no_grad()
def test_nothing_pruned_is_the_identity(family: str, batch: TrainBatch, tmp_path: Path) -> None:
    teacher = load_decoder(write_family(family, tmp_path), dtype=torch.float32)
    student = _narrow(teacher, batch, [0, 1, 2])
    assert student.config == teacher.config
    token_ids = torch.tensor(random_tokens(40))
    assert torch.equal(_logits(student, token_ids), _logits(teacher, token_ids))


@pytest.mark.parametrize("family", NATIVE)
@torch.no_grad()
def test_an_exported_student_is_the_same_model_to_transformers(
    family: str, batch: TrainBatch, tmp_path: Path
) -> None:
    (tmp_path / "teacher").mkdir()
    teacher = load_decoder(write_family(family, tmp_path / "teacher"), dtype=torch.float32)
    student = _narrow(teacher, batch, [0, 2], **SIZES)
    assert sum(p.numel() for p in student.parameters()) == student.config.num_parameters
    (tmp_path / "export").mkdir()
    save_decoder(student, tmp_path / "export", dtype=torch.float32)
    token_ids = torch.tensor(random_tokens(40))
    theirs = transformers_model(tmp_path / "export")(token_ids[None]).logits[0]
    torch.testing.assert_close(_logits(student, token_ids), theirs, rtol=1e-4, atol=1e-4)
    read_back = load_decoder(tmp_path / "export", dtype=torch.float32)
    assert torch.equal(_logits(read_back, token_ids), _logits(student, token_ids))


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_dropped_is_what_a_teacher_without_it_lacks(tied: bool, batch: TrainBatch) -> None:
    """Neurons and whole groups that write nothing can be cut without a trace."""
    teacher = make_decoder(1, tied=tied)
    head_dim = teacher.config.head_dim
    for layer in teacher.layers:
        layer.down_proj.weight[:, ::2] = 0
        layer.gate_up_proj.weight[: teacher.config.intermediate_size][::2] = 0  # silu(0) = 0: never active
        layer.qkv_proj.weight[-2 * head_dim : -head_dim] = 0  # the values of group 0
    student = _narrow(
        teacher, batch, [0, 1], intermediate_size=12, num_attention_heads=2, num_key_value_heads=1
    )
    expected = forward_batch(teacher, batch)
    torch.testing.assert_close(forward_batch(student, batch), expected, rtol=1e-5, atol=1e-5)
    assert (student.lm_head is None) == tied


@torch.no_grad()
def test_each_slice_is_the_teachers_own(batch: TrainBatch) -> None:
    teacher = make_decoder(1, tied=False)
    choice = WidthChoice(
        layers=(1,), hidden=(0, 3, 15), neurons=((2, 5),), heads=((1, 2),), kv_heads=((0, 1),)
    )
    student = build_narrow_student(teacher, choice)
    ours, theirs = student.layers[0], teacher.layers[1]
    hidden = list(choice.hidden)
    queries = [*range(4, 8), *range(8, 12)]
    keys_and_values = [*range(16, 24), *range(24, 32)]
    assert torch.equal(ours.qkv_proj.weight, theirs.qkv_proj.weight[queries + keys_and_values][:, hidden])
    assert torch.equal(ours.o_proj.weight, theirs.o_proj.weight[hidden][:, queries])
    assert torch.equal(ours.gate_up_proj.weight, theirs.gate_up_proj.weight[[2, 5, 26, 29]][:, hidden])
    assert torch.equal(ours.down_proj.weight, theirs.down_proj.weight[hidden][:, [2, 5]])
    assert torch.equal(ours.input_layernorm.weight, theirs.input_layernorm.weight[hidden])
    assert torch.equal(student.embed_tokens.weight, teacher.embed_tokens.weight[:, hidden])
    assert torch.equal(student.head_weight, teacher.head_weight[:, hidden])
    assert torch.equal(student.norm.weight, teacher.norm.weight[hidden])
    with torch.no_grad():
        ours.down_proj.weight.fill_(7)
    assert not (theirs.down_proj.weight == 7).any()


def test_the_most_important_groups_are_kept_whole() -> None:
    teacher = make_decoder(1).config  # two groups of two query heads
    importance = ActivationImportance(
        hidden=torch.arange(16.0),
        neurons=torch.stack([torch.arange(24.0), -torch.arange(24.0)]),
        # The best head is in the worse group; the second layer prefers the other group.
        heads=torch.tensor([[0.0, 9.0, 5.0, 5.0], [3.0, 2.0, 1.0, 1.0]]),
    )
    one_group = replace(
        teacher, hidden_size=2, intermediate_size=3, num_attention_heads=2, num_key_value_heads=1
    )
    choice = choose_width(importance, [0, 1], teacher, one_group)
    assert choice.hidden == (14, 15)
    assert choice.neurons == ((21, 22, 23), (0, 1, 2))
    assert choice.kv_heads == ((1,), (0,))
    assert choice.heads == ((2, 3), (0, 1))
    fewer_queries = replace(teacher, num_attention_heads=2)
    choice = choose_width(importance, [1], teacher, fewer_queries)
    assert (choice.kv_heads, choice.heads) == (((0, 1),), ((0, 2),))
    assert choose_width(importance, [1], teacher, teacher).neurons == (tuple(range(24)),)


@torch.no_grad()
def test_importance_is_the_mean_of_magnitudes_and_its_norm_over_documents() -> None:
    teacher = make_decoder(1)
    documents = make_documents([9, 4, 6])
    seen: dict[str, list[Tensor]] = {"down_proj": [], "o_proj": [], "readers": []}
    layer = teacher.layers[1]
    layer.down_proj.register_forward_pre_hook(lambda _, inputs: seen["down_proj"].append(inputs[0]))
    layer.o_proj.register_forward_pre_hook(lambda _, inputs: seen["o_proj"].append(inputs[0]))
    for block in teacher.layers:
        for reader in (block.qkv_proj, block.gate_up_proj):
            reader.register_forward_pre_hook(lambda _, inputs: seen["readers"].append(inputs[0]))
    teacher.norm.register_forward_hook(lambda _, __, output: seen["readers"].append(output))
    for document in documents:
        forward_batch(teacher, build_batch([document]), TorchOperators())
    means = torch.stack([x.double().abs().mean(0) for x in seen["down_proj"]])
    neurons = means.square().sum(0).sqrt()
    means = torch.stack([x.double().view(len(x), 4, 4).norm(dim=-1).mean(0) for x in seen["o_proj"]])
    heads = means.square().sum(0).sqrt()
    means = torch.stack([x.double().abs().mean(0) for x in seen["readers"]])
    hidden = means.view(3, 2 * len(teacher.layers) + 1, 16).square().sum(0).sqrt().sum(0)
    for batches in ([build_batch(documents)], [build_batch(documents[:1]), build_batch(documents[1:])]):
        importance = activation_importance(teacher, batches)
        torch.testing.assert_close(importance.neurons[1], neurons, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(importance.heads[1], heads, rtol=1e-5, atol=1e-8)
        torch.testing.assert_close(importance.hidden, hidden, rtol=1e-5, atol=1e-8)
    assert not teacher.layers[0].down_proj._forward_pre_hooks
    assert len(teacher.layers[0].qkv_proj._forward_pre_hooks) == 1  # this test's own


def test_a_recorded_choice_reads_back_equal(tmp_path: Path) -> None:
    choice = WidthChoice((0, 2), (1, 2), ((0,), (1,)), ((0, 1), (2, 3)), ((0,), (1,)))
    (tmp_path / "width.json").write_text(width_as_json(choice))
    assert read_width(tmp_path / "width.json") == choice
    (tmp_path / "width.json").write_text("{}")
    for name in ("width.json", "gone.json"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_width(tmp_path / name)
