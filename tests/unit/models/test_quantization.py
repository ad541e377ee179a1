"""Int8 weights: one form, whether it is made while loading or read from the disk."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import NATIVE, write_family
from tests.unit.models.test_loader import TOKENS, logits
from torch import Tensor

from tessera_cli.errors import ModelError, UsageError
from tessera_cli.int8_weight import Int8Weight
from tessera_cli.models.checkpoint_tensors import checkpoint_tensors
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.int8_checkpoint import write_int8_checkpoint
from tessera_cli.models.linear_layers import QuantisedLinear
from tessera_cli.models.loader import (
    load_config,
    load_decoder,
    load_int8_decoder,
    load_model,
    select_quantization,
)
from tessera_cli.models.weight_files import INT8_WEIGHTS
from tessera_cli.serving.baseline import TransformersBaseline

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(params=["tied", "untied"])
def model_dir(request: pytest.FixtureRequest, tiny_model_dir: Path, tiny_untied_model_dir: Path) -> Path:
    return tiny_model_dir if request.param == "tied" else tiny_untied_model_dir


@pytest.fixture
def int8_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return write_int8_checkpoint(tiny_model_dir, tmp_path / "int8", overwrite=False).path


def int8_decoder(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_int8_decoder(path, dtype=dtype)


def dequantised(path: Path) -> Decoder:
    """The float32 decoder with the weights that the int8 ones stand for."""
    decoder, tensors = load_decoder(path, dtype=torch.float32), dict(checkpoint_tensors(int8_decoder(path)))
    with torch.no_grad():
        for name, target in checkpoint_tensors(decoder):
            value = tensors[name]
            if value.dtype is torch.int8:
                value = Int8Weight(value, tensors[f"{name}_scale"]).dequantise()
            target.copy_(value)
    return decoder


def as_bfloat16(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    tensors = {n: t.to(torch.bfloat16) for n, t in load_file(target / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return target


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
def test_quantised_while_loading_is_quantised_on_disk_to_the_bit(
    model_dir: Path, tmp_path: Path, stored: str, computed: torch.dtype
) -> None:
    source = model_dir if stored == "float32" else as_bfloat16(model_dir, tmp_path / "bfloat16")
    written = write_int8_checkpoint(source, tmp_path / "int8", overwrite=False)
    loading, on_disk = (dict(checkpoint_tensors(int8_decoder(p, computed))) for p in (source, written.path))
    assert loading.keys() == on_disk.keys()
    for name, tensor in loading.items():
        assert tensor.dtype == on_disk[name].dtype
        assert torch.equal(tensor, on_disk[name]), name


@pytest.mark.parametrize("family", sorted(NATIVE))
def test_logits_are_those_of_the_weights_that_int8_stands_for(family: str, tmp_path: Path) -> None:
    path = write_family(family, tmp_path)
    tokens = [token % 128 for token in TOKENS]
    expected = logits(dequantised(path), tokens)
    torch.testing.assert_close(logits(int8_decoder(path), tokens), expected, atol=1e-4, rtol=1e-4)
    assert not torch.equal(expected, logits(load_decoder(path, dtype=torch.float32), tokens))


def test_only_norms_and_biases_are_not_int8(tmp_path: Path) -> None:
    decoder = int8_decoder(write_family("llama-biases", tmp_path))
    floats = {name: p for name, p in checkpoint_tensors(decoder) if p.dtype is not torch.int8}
    assert all(p.dim() == 1 and p.dtype is torch.float32 for p in floats.values())
    assert {name.rpartition(".")[2] for name in floats} == {"weight", "weight_scale", "bias"}
    assert not any(parameter.requires_grad for parameter in decoder.parameters())


def test_a_tied_head_is_the_embedding_itself(tiny_model_dir: Path) -> None:
    decoder = int8_decoder(tiny_model_dir)
    assert isinstance(decoder.lm_head, QuantisedLinear)
    assert decoder.lm_head.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize("family", sorted(NATIVE))
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_bytes_of_the_weights_are_known_before_they_are_read(
    family: str, quantization: str, tmp_path: Path
) -> None:
    path = write_family(family, tmp_path)
    model = load_model(path, torch.float32, quantization=quantization)
    tensors: list[Tensor] = [tensor for _, tensor in checkpoint_tensors(model)]
    known = ModelConfig.from_dir(path).weight_bytes(torch.float32.itemsize, quantization)
    assert known == sum(tensor.nbytes for tensor in tensors)


def test_the_directory_says_what_it_is_and_has_the_tokenizer(tiny_model_dir: Path, int8_dir: Path) -> None:
    config, source = ModelConfig.from_dir(int8_dir), ModelConfig.from_dir(tiny_model_dir)
    assert (config.quantization, config.dtype) == ("int8", source.dtype)
    assert json.loads((int8_dir / "config.json").read_text())["quantization_config"] == {
        "quant_method": "tessera-int8",
        "bits": 8,
        "symmetric": True,
        "granularity": "output_channel",
    }
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (int8_dir / name).read_bytes() == (tiny_model_dir / name).read_bytes()


def test_transformers_refuses_the_directory_instead_of_reading_values_without_scales(int8_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(int8_dir)
    with pytest.raises(UsageError, match="transformers cannot load"):
        TransformersBaseline(int8_dir, dtype="float32", device="cpu")


def test_sizes_are_those_of_the_weight_files(tiny_model_dir: Path, tmp_path: Path) -> None:
    written = write_int8_checkpoint(tiny_model_dir, tmp_path / "int8", overwrite=False)
    assert written.source_bytes == (tiny_model_dir / "model.safetensors").stat().st_size
    assert written.int8_bytes == (written.path / INT8_WEIGHTS).stat().st_size
    assert written.int8_bytes < 0.4 * written.source_bytes


def test_auto_is_what_the_checkpoint_is(tiny_model_dir: Path, int8_dir: Path, tmp_path: Path) -> None:
    plain, quantised = load_config(tiny_model_dir), load_config(int8_dir)
    assert select_quantization("auto", plain, tiny_model_dir) == "none"
    assert select_quantization("none", plain, tiny_model_dir) == "none"
    assert select_quantization("int8", plain, tiny_model_dir) == "int8"
    assert select_quantization("auto", quantised, int8_dir) == "int8"
    assert select_quantization("int8", quantised, int8_dir) == "int8"
    with pytest.raises(UsageError, match="is quantised to int8 and cannot run without"):
        select_quantization("none", quantised, int8_dir)
    with pytest.raises(UsageError, match="'int4' is not a quantisation"):
        select_quantization("int4", plain, tiny_model_dir)
    generic = write_family("gpt2", tmp_path / "gpt2")
    assert select_quantization("auto", load_config(generic), generic) == "none"
    with pytest.raises(UsageError, match="runs through transformers"):
        select_quantization("int8", load_config(generic), generic)


@pytest.mark.parametrize(
    ("block", "named"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised with gptq"),
        ({"quant_method": "awq"}, "quantised with awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantised with bitsandbytes"),
        ({"quant_method": "fp8"}, "quantised with fp8"),
        ({"bits": 8}, "a method that it does not name"),
        ({"quant_method": "tessera-int8", "bits": 4}, "tessera-int8 of another kind: bits=4, no granularity"),
        ("int8", "quantization_config='int8'"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(map(str, value.values())),
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_what_other_tools_quantised_is_refused_by_name(
    family: str, block: object, named: str, tmp_path: Path
) -> None:
    path = write_family(family, tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": block}))
    with pytest.raises(ModelError, match=named):
        load_config(path)


def change(path: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of a directory by name, or remove them; a dot is written as two underscores."""
    (file,) = path.glob("*.safetensors")
    stored = load_file(file)
    for name, tensor in ((name.replace("__", "."), tensor) for name, tensor in tensors.items()):
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, file)


def test_a_directory_that_is_not_what_it_says_is_refused(int8_dir: Path, tiny_model_dir: Path) -> None:
    stored = load_file(int8_dir / INT8_WEIGHTS)
    values, scales = stored[EMBEDDING], stored[f"{EMBEDDING}_scale"]
    change(int8_dir, model__embed_tokens__weight=values.float())
    with pytest.raises(ModelError, match=r"embed_tokens\.weight is stored as float32"):
        int8_decoder(int8_dir)
    change(int8_dir, model__embed_tokens__weight=values, model__embed_tokens__weight_scale=scales.half())
    with pytest.raises(ModelError, match=r"weight_scale is stored as float16"):
        int8_decoder(int8_dir)
    change(int8_dir, model__embed_tokens__weight_scale=scales[1:].clone())
    with pytest.raises(ModelError, match=r"weight_scale is \[383\]"):
        int8_decoder(int8_dir)
    change(int8_dir, model__embed_tokens__weight_scale=None)
    with pytest.raises(ModelError, match=r"lacks 1 of \d+ tensors, model\.embed_tokens\.weight_scale"):
        int8_decoder(int8_dir)
    whole = (tiny_model_dir / "model.safetensors").read_bytes()
    (int8_dir / INT8_WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="is damaged"):
        int8_decoder(int8_dir)


def test_a_weight_that_is_not_finite_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_model_dir, tmp_path / "model")
    weight = load_file(path / "model.safetensors")[EMBEDDING]
    weight[7, 3] = torch.inf
    change(path, model__embed_tokens__weight=weight)
    with pytest.raises(ModelError, match=r"embed_tokens\.weight: a weight that is not finite"):
        write_int8_checkpoint(path, tmp_path / "int8", overwrite=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model"]


def test_int8_weights_are_for_serving_only(int8_dir: Path, tmp_path: Path) -> None:
    for refuses in (
        lambda: ModelConfig.unquantised(int8_dir),
        lambda: load_decoder(int8_dir, dtype=torch.float32),
        lambda: write_int8_checkpoint(int8_dir, tmp_path / "again", overwrite=False),
    ):
        with pytest.raises(ModelError, match="is quantised to int8, which is for serving only"):
            refuses()
    assert not (tmp_path / "again").exists()


def test_rows_of_zeros_and_of_subnormal_numbers_have_an_int8_form() -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-44, -1e-45], [2.7e-43, -2.7e-43], [1.0, -0.5]])
    quantised = Int8Weight.quantise(weight)
    assert quantised.values.abs().max() <= 127
    assert bool((quantised.dequantise() - weight).abs().le(1e-2 * weight.abs().amax(1, True) + 1e-43).all())
