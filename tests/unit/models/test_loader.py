import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tessera_cli.errors import ModelError, UsageError
from tessera_cli.models import weight_files
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_config, load_decoder, save_decoder, select_dtype


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[0].transpose(0, 1)


def logits(decoder: Decoder, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        ids = torch.tensor(token_ids)
        return decoder.logits(decoder(ids, torch.arange(len(ids)), causal))


def transformers_logits(path: Path, token_ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return AutoModelForCausalLM.from_pretrained(path)(torch.tensor([token_ids])).logits[0]


TOKENS = [5, 17, 200, 3, 44, 44, 9, 120]


@pytest.fixture(params=["tied", "untied"])
def model_dir(request: pytest.FixtureRequest, tiny_model_dir: Path, tiny_untied_model_dir: Path) -> Path:
    return tiny_model_dir if request.param == "tied" else tiny_untied_model_dir


def copy(source: Path, target: Path) -> Path:
    return shutil.copytree(source, target / "model")


def test_logits_are_those_of_transformers(model_dir: Path) -> None:
    ours = logits(load_decoder(model_dir, dtype=torch.float32), TOKENS)
    torch.testing.assert_close(ours, transformers_logits(model_dir, TOKENS), atol=1e-4, rtol=1e-4)


def test_a_saved_decoder_is_the_same_for_both(model_dir: Path, tmp_path: Path) -> None:
    decoder = load_decoder(model_dir, dtype=torch.float32)
    save_decoder(decoder, tmp_path, dtype=torch.float32)
    expected = logits(decoder, TOKENS)
    assert torch.equal(logits(load_decoder(tmp_path, dtype=torch.float32), TOKENS), expected)
    torch.testing.assert_close(transformers_logits(tmp_path, TOKENS), expected, atol=1e-4, rtol=1e-4)


def test_shards_load_like_one_file(model_dir: Path, tmp_path: Path) -> None:
    path = copy(model_dir, tmp_path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    sharded = load_decoder(path, dtype=torch.float32)
    assert torch.equal(logits(sharded, TOKENS), logits(load_decoder(model_dir, dtype=torch.float32), TOKENS))
    (path / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1\.safetensors cannot be read"):
        load_decoder(path, dtype=torch.float32)


@pytest.mark.parametrize("num_bytes", [1, 20_000])
def test_weights_are_the_same_however_little_of_their_file_is_mapped_at_once(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    whole = load_file(model_dir / "model.safetensors")
    monkeypatch.setattr(weight_files, "_MAPPED_BYTES", num_bytes)
    pieces = {stored.name: stored.value for stored in weight_files.read_tensors(model_dir)}
    assert pieces.keys() == whole.keys()
    assert all(torch.equal(pieces[name], value) for name, value in whole.items())
    assert len({value.untyped_storage().data_ptr() for value in pieces.values()}) > 1


def test_damaged_weights_are_told_in_one_line(model_dir: Path, tmp_path: Path) -> None:
    path = copy(model_dir, tmp_path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for cut in (0, 4, 1000, len(whole) - 64):
        file.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match="is damaged"):
            load_decoder(path, dtype=torch.float32)
    file.unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_decoder(path, dtype=torch.float32)
    for weight_map in ([], None, {"model.norm.weight": 1}, {"model.norm.weight": "."}):
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match="cannot be read"):
            load_decoder(path, dtype=torch.float32)


@pytest.mark.parametrize("sizes", [{"num_hidden_layers": 9_999}, {"intermediate_size": 10**12}])
def test_sizes_that_the_weights_cannot_have_are_refused_before_memory_is_asked_for(
    model_dir: Path, tmp_path: Path, sizes: dict[str, int]
) -> None:
    path = shutil.copytree(model_dir, tmp_path / "absurd")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | sizes))
    with pytest.raises(ModelError, match=r"asks for .* parameters, and the weights have"):
        load_decoder(path, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_refused(model_dir: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    path = copy(model_dir, tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
    with pytest.raises(ModelError, match=f"is stored as {str(dtype).removeprefix('torch.')}"):
        load_decoder(path, dtype=torch.float32)


def test_a_missing_extra_or_misshapen_tensor_is_named(model_dir: Path, tmp_path: Path) -> None:
    path = copy(model_dir, tmp_path)
    tensors = load_file(path / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 1 of \d+ tensors, model\.norm\.weight"):
        load_decoder(path, dtype=torch.float32)
    save_file(tensors | {"model.norm.weight": norm[:3].clone()}, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[3\]"):
        load_decoder(path, dtype=torch.float32)
    extra = {"model.norm.weight": norm, "model.layers.0.self_attn.q_proj.bias": norm.clone()}
    save_file(tensors | extra, path / "model.safetensors")
    with pytest.raises(ModelError, match=r"q_proj\.bias"):
        load_decoder(path, dtype=torch.float32)


def test_a_tied_config_drops_no_head_of_another_matrix(
    tiny_model_dir: Path, tiny_untied_model_dir: Path, tmp_path: Path
) -> None:
    path = copy(tiny_untied_model_dir, tmp_path / "untied")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"lm_head\.weight of its own"):
        load_decoder(path, dtype=torch.float32)
    path = copy(tiny_model_dir, tmp_path / "tied")
    tensors = load_file(path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, path / "model.safetensors")
    load_decoder(path, dtype=torch.bfloat16)


@pytest.mark.parametrize("model_type", [["llama"], {}, None])
def test_a_model_type_that_is_no_text_is_a_model_error(
    tiny_model_dir: Path, tmp_path: Path, model_type
) -> None:
    path = copy(tiny_model_dir, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    with pytest.raises(ModelError):
        load_config(path)


def test_auto_is_float32_on_a_cpu_and_the_stored_dtype_elsewhere() -> None:
    assert select_dtype("auto", "bfloat16", "cpu") is torch.float32
    assert select_dtype("auto", "bfloat16", "cuda") is torch.bfloat16
    assert select_dtype("float16", "bfloat16", "cpu") is torch.float16
    with pytest.raises(UsageError, match="'fp16' is not a dtype"):
        select_dtype("fp16", "float32", "cpu")
