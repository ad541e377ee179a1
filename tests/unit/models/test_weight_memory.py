"""Memory for the weights of a served model."""

import gc
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from tessera_cli.models.loader import load_decoder
from tessera_cli.models.weight_memory import allocate, allocate_together


def _meta_module() -> nn.Sequential:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(24, 64), nn.Linear(64, 33), nn.LayerNorm(33))
        module.register_buffer("values", torch.empty(3, dtype=torch.int8))
    return module


def _weight(module: nn.Sequential, index: int) -> Tensor:
    return cast(nn.Linear, module[index]).weight


def test_tensors_keep_their_shapes_and_dtypes_and_do_not_overlap() -> None:
    module = _meta_module()
    expected = {name: (t.shape, t.dtype) for name, t in module.state_dict().items()}
    allocate_together(module)
    state = module.state_dict()
    assert {name: (t.shape, t.dtype) for name, t in state.items()} == expected
    for i, tensor in enumerate(state.values()):
        tensor.fill_(i)
    assert all((tensor == i).all() for i, tensor in enumerate(state.values()))
    assert {name for name, _ in module.named_parameters()} == set(state) - {"values"}


def test_every_tensor_begins_a_cache_line() -> None:
    module = _meta_module()
    allocate_together(module)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in module.state_dict().values())


def test_a_matrix_that_is_given_up_for_a_copy_does_not_stay_in_memory() -> None:
    module = _meta_module()
    allocate_together(module)
    kept, given_up = _weight(module, 0), _weight(module, 1)
    assert kept.untyped_storage().nbytes() > kept.nbytes
    assert given_up.untyped_storage().nbytes() == given_up.nbytes


def test_the_memory_outlives_the_module() -> None:
    module = _meta_module()
    allocate_together(module)
    weight = _weight(module, 0)
    weight.data.fill_(7)
    del module
    gc.collect()
    assert (weight == 7).all()


def test_each_tensor_on_its_own_has_its_own_storage() -> None:
    module = _meta_module()
    allocate(module, "cpu")
    storages = [tensor.untyped_storage() for tensor in module.state_dict().values()]
    assert all(s.nbytes() == t.nbytes for s, t in zip(storages, module.state_dict().values(), strict=True))


def test_weights_are_the_same_together(tiny_model_dir: Path) -> None:
    alone = load_decoder(tiny_model_dir, dtype=torch.float32).state_dict()
    together = load_decoder(tiny_model_dir, dtype=torch.float32, together=True).state_dict()
    assert list(alone) == list(together)
    assert all(torch.equal(alone[name], together[name]) for name in alone)
