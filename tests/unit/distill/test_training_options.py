"""What a recipe may ask of a step: precision, memory, averages, adapters; none of it changes what it says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tessera_cli.distill.data.corpus import TrainBatch, build_batch
from tessera_cli.distill.events import Event, Note
from tessera_cli.distill.students.student import forward_batch
from tessera_cli.distill.training.checkpoint import load_checkpoint, save_checkpoint
from tessera_cli.distill.training.lora import add_adapters, merge_adapters, save_adapters
from tessera_cli.distill.training.processes import Processes
from tessera_cli.distill.training.throughput import forward_flops
from tessera_cli.distill.training.trainer import Trainer
from tessera_cli.errors import DivergedError, UsageError
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder, save_decoder
from tessera_cli.recipe.train_section import LoraSection, TrainSection
from tests.training_factories import (
    assert_same_bits,
    copy_weights,
    make_decoder,
    make_documents,
    make_steps,
    make_trainer,
)

LORA = LoraSection(r=4, alpha=8, dropout=0.25)


def _with_adapters(seed: int) -> Decoder:
    student = make_decoder(2)
    add_adapters(student, LORA, seed=seed)
    return student


def _trained(student: Decoder, steps: list[list[TrainBatch]], **keys: object) -> Trainer:
    trainer = make_trainer(student, make_decoder(1), num_steps=8, learning_rate=0.01, **keys)
    for step in steps:
        trainer.train_step(step)
    return trainer


def test_layers_that_are_computed_twice_give_the_same_weights() -> None:
    plain, twice = make_decoder(2), make_decoder(2)
    _trained(plain, make_steps(2))
    _trained(twice, make_steps(2), gradient_checkpointing=True)
    assert_same_bits(copy_weights(plain), copy_weights(twice))


def test_the_average_keeps_its_share_of_every_step() -> None:
    student = make_decoder(2)
    trainer = make_trainer(student, make_decoder(1), num_steps=8, ema_decay=0.75)
    expected = copy_weights(student)
    for step in make_steps(3):
        trainer.train_step(step)
        for name, weight in copy_weights(student).items():
            expected[name] = 0.75 * expected[name] + 0.25 * weight
    last = copy_weights(student)
    with trainer.measured_weights():
        measured = copy_weights(student)
    for name, weight in measured.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(weight, last[name])
    assert_same_bits(copy_weights(student), last)
    assert_same_bits(trainer.state_dict().measured, measured)


@pytest.mark.parametrize(
    "keys",
    [
        {"ema_decay": 0.5},
        {"dtype": "float16"},
        {"dtype": "bfloat16"},
        # torch's compiler warns of torch's own code.
        pytest.param({"compile": True}, marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")]),
    ],
    ids=str,
)
def test_a_checkpoint_has_all_that_a_resumed_run_needs(keys: dict[str, object], tmp_path: Path) -> None:
    steps = make_steps(4)
    whole, first = _trained(make_decoder(2), steps, **keys), _trained(make_decoder(2), steps[:2], **keys)
    path = save_checkpoint(tmp_path, first.state_dict(), fingerprints={}, keep=1)
    resumed = make_trainer(make_decoder(3), make_decoder(1), num_steps=8, learning_rate=0.01, **keys)
    resumed.load_state_dict(load_checkpoint(path, fingerprints={}))
    for step in steps[2:]:
        resumed.train_step(step)
    ours, theirs = resumed.state_dict(), whole.state_dict()
    for part in ("student", "optimizer", "average"):
        assert_same_bits(getattr(ours, part), getattr(theirs, part))
    assert ours.loss_scale == theirs.loss_scale
    assert (ours.loss_scale is None) == (keys.get("dtype") != "float16")


def test_a_step_that_overflows_float16_changes_no_weight_and_lowers_the_scale() -> None:
    events: list[Event] = []
    student = make_decoder(2)
    trainer = make_trainer(student, make_decoder(1), listener=events.append, dtype="float16")
    student.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    before, scale = copy_weights(student), trainer.state_dict().loss_scale
    assert trainer.train_step(make_steps(1)[0]) is None
    assert_same_bits(copy_weights(student), before)
    assert trainer.state_dict().loss_scale.scale < scale.scale
    assert (trainer.step, events) == (1, [Note("step 1 overflowed float16 and was left out")])


def test_a_step_that_overflows_float16_leaves_the_average_alone() -> None:
    student = make_decoder(2)
    trainer = make_trainer(student, make_decoder(1), dtype="float16", ema_decay=0.5)
    first, second = make_steps(2)
    assert trainer.train_step(first) is not None
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().average.items()}
    student.norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    assert trainer.train_step(second) is None
    assert_same_bits(trainer.state_dict().average, before)


def test_a_loss_that_is_not_finite_blames_its_micro_batch() -> None:
    teacher = make_decoder(1, tied=False)
    first, second = (build_batch(make_documents([6], seed)) for seed in (0, 1))
    with torch.no_grad():
        teacher.embed_tokens.weight[second.input_ids[0]] = float("nan")
    assert second.input_ids[0] not in first.input_ids
    trainer = make_trainer(make_decoder(2), teacher)
    with pytest.raises(DivergedError, match="diverged at step 1: loss nan") as raised:
        trainer.train_step([first, second])
    assert list(raised.value.micro_batches) == [1]


def test_adapters_start_as_nothing_and_leave_what_they_adapt_alone() -> None:
    batch, plain = build_batch(make_documents([9, 4])), make_decoder(2)
    student = _with_adapters(0)
    assert torch.equal(forward_batch(student, batch), forward_batch(plain, batch))
    trainer = _trained(student, make_steps(2))
    assert all("lora_" in name for name in trainer.parameters)
    assert trainer.state_dict().student.keys() == trainer.parameters.keys()
    frozen = {
        name.replace(".base_layer", ""): p for name, p in student.named_parameters() if "lora_" not in name
    }
    assert_same_bits({name: p.detach() for name, p in frozen.items()}, copy_weights(plain))


def test_dropout_depends_on_the_step_alone(tmp_path: Path) -> None:
    steps = make_steps(4)
    whole, first = _trained(_with_adapters(0), steps), _trained(_with_adapters(0), steps[:2])
    path = save_checkpoint(tmp_path, first.state_dict(), fingerprints={}, keep=1)
    torch.manual_seed(77)  # another process
    resumed = make_trainer(_with_adapters(0), make_decoder(1), num_steps=8, learning_rate=0.01)
    resumed.load_state_dict(load_checkpoint(path, fingerprints={}))
    for step in steps[2:]:
        resumed.train_step(step)
    assert_same_bits(resumed.state_dict().student, whole.state_dict().student)


def test_merged_adapters_are_the_product_that_they_were(tmp_path: Path) -> None:
    student, batch = _with_adapters(0), build_batch(make_documents([9, 4]))
    _trained(student, make_steps(3))
    layer = student.layers[1].qkv_proj
    down, up = (getattr(layer, name)["default"].weight.detach() for name in ("lora_A", "lora_B"))
    expected = layer.get_base_layer().weight.detach() + (up @ down) * (LORA.alpha / LORA.r)
    adapted = forward_batch(student, batch).detach()
    merge_adapters(student)
    assert torch.equal(student.layers[1].qkv_proj.weight, expected)
    assert copy_weights(student).keys() == copy_weights(make_decoder(2)).keys()
    torch.testing.assert_close(forward_batch(student, batch), adapted, rtol=1e-4, atol=1e-5)
    save_decoder(student, tmp_path, dtype=torch.float32)
    loaded = load_decoder(tmp_path, dtype=torch.float32)
    assert torch.equal(forward_batch(loaded, batch), forward_batch(student, batch))


# peft's own use of transformers.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_saved_adapters_are_those_that_peft_loads(tmp_path: Path) -> None:
    from peft import PeftModel

    base, adapters = tmp_path / "base", tmp_path / "adapters"
    base.mkdir()
    adapters.mkdir()
    save_decoder(make_decoder(2), base, dtype=torch.float32)
    student = _with_adapters(0)
    _trained(student, make_steps(3))
    save_adapters(student, adapters, LORA, base=str(base))
    ids = torch.arange(7)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters).eval()
    batch = build_batch(make_documents([7]))
    batch = TrainBatch(ids, torch.arange(7), [0, 7], batch.target_index, batch.target_ids)
    ours = student.logits(forward_batch(student, batch))
    torch.testing.assert_close(model(ids[None]).logits[0], ours, rtol=1e-3, atol=1e-4)


def test_micro_batches_are_dealt_out_once_and_evenly() -> None:
    batches = [batch for step in make_steps(3) for batch in step][:5]
    dealt = []
    for rank in range(3):
        processes = Processes("cpu")
        processes.count, processes.rank = 3, rank
        share = processes.deal(batches)
        assert len(share) == 2
        assert all(part.batch is batches[part.number] for part in share)
        dealt += [part.number for part in share if part.counts]
    assert sorted(dealt) == [0, 1, 2, 3, 4]


def test_a_tracker_that_is_not_installed_is_refused() -> None:
    with pytest.raises(UsageError, match="names no_such_tracker, which is not installed"):
        Processes("cpu", trackers=["no_such_tracker"])


def test_the_operations_of_a_forward_pass_are_those_of_its_products() -> None:
    decoder, batch = make_decoder(2), build_batch(make_documents([9, 4]))
    matrices = sum(p.numel() for name, p in decoder.named_parameters() if "proj" in name)
    attention = 2 * 2 * 16 * (9**2 + 4**2)  # layers, FLOP, width, half of each square twice
    expected = 2 * matrices * 13 + 2 * 61 * 16 * len(batch.target_ids) + attention
    assert forward_flops(decoder.config, [batch]) == expected


def test_the_parts_of_a_step_are_within_it() -> None:
    figures = make_trainer(make_decoder(2), make_decoder(1)).train_step(make_steps(1)[0])
    parts = (figures.teacher_seconds, figures.student_seconds, figures.loss_seconds)
    assert min(parts) > 0
    assert sum(parts) < figures.step_seconds
    assert 0 <= figures.padding_share < 1
    assert 0 < figures.supervised_tokens_per_second < figures.tokens_per_second
    assert figures.model_flops_utilisation > 0


@pytest.mark.parametrize(
    "keys",
    [
        {"ema_decay": 1.0},
        {"early_stop_patience": 0},
        {"trackers": ["wandb", "wandb"]},
        {"lora": {"r": 0}},
        {"lora": {"target_modules": []}},
        {"lora": {"target_modules": ["q_proj"]}},
        {"lora": {"dropout": 1.0}},
        {"lora": {}, "data_parallel": "fsdp2"},
        {"dtype": "float16", "data_parallel": "fsdp2"},
        {"compile": True, "data_parallel": "fsdp2"},
        {"gradient_checkpointing": "yes"},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        TrainSection(max_steps=1, **keys)
