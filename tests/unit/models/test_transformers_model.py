"""Models that transformers computes: its own logits over our attention; one line for the others."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.families import GENERIC, WINDOW, plain_attend, random_tokens, transformers_model, write_family

from tessera_cli.errors import ModelError
from tessera_cli.models.loader import load_config, load_decoder, load_model

LENGTH = 60
TOKENS = random_tokens(LENGTH)


@pytest.fixture(scope="module", params=list(GENERIC))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(request.param, tmp_path_factory.mktemp(request.param))


def test_logits_are_those_of_transformers(model_dir: Path) -> None:
    model = load_model(model_dir, torch.float32)
    with torch.inference_mode():
        attend = plain_attend(model.attention_layers)
        ours = model.logits(model(torch.tensor(TOKENS), torch.arange(LENGTH), attend))
        theirs = transformers_model(model_dir)(torch.tensor([TOKENS])).logits[0]
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-5)


def test_what_is_known_before_the_weights_is_what_is_loaded(model_dir: Path) -> None:
    config, model = load_config(model_dir), load_model(model_dir, torch.float32)
    assert config == model.config
    assert isinstance(model, torch.nn.Module)
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert model.dtype == torch.float32
    assert (config.eos_token_ids, config.max_position_embeddings) == ((2,), 512)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_to_sixteen_bits_is_no_other_model(model_dir: Path, dtype: torch.dtype) -> None:
    attends = load_model(model_dir, dtype).attention_layers
    assert attends == load_model(model_dir, torch.float32).attention_layers


def test_windows_caps_and_scales_are_read_off_the_model(tmp_path: Path) -> None:
    layers = load_model(write_family("gemma2", tmp_path), torch.float32).attention_layers
    assert [layer.sliding_window for layer in layers] == [WINDOW, None, WINDOW]
    assert {(layer.logits_soft_cap, layer.scale) for layer in layers} == {(5.0, 0.25)}


def test_a_window_longer_than_the_probe_is_found(tmp_path: Path) -> None:
    layers = load_model(write_family("phi3", tmp_path, sliding_window=300), torch.float32).attention_layers
    assert {layer.sliding_window for layer in layers} == {300}


def test_rotary_frequencies_that_depend_on_the_length_bound_it(tmp_path: Path) -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    rope["original_max_position_embeddings"] = 64
    path = write_family("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=64)
    assert load_config(path).max_position_embeddings == 64


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("MambaConfig", {"state_size": 8}, "no positions to attend by"),
    "bloom": ("BloomConfig", {"n_head": 4}, "no positions to attend by"),
    "gpt_oss": (
        "GptOssConfig",
        {"num_local_experts": 4, "head_dim": 16},
        "over our attention are not",
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "1 of its 2 layers"),
    "falcon_h1": ("FalconH1Config", {"mamba_d_ssm": 64, "mamba_n_heads": 4}, "beside attention"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(REFUSED))
def test_what_keeps_other_state_is_refused_in_one_line(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    import transformers

    class_name, differs, named = REFUSED[name]
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    if name in ("mamba", "bloom"):
        sizes = {key: sizes[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    config = getattr(transformers, class_name)(**sizes, **differs)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=named) as caught:
        load_model(tmp_path, dtype)
    assert "\n" not in str(caught.value)
    assert "GPT-2" in str(caught.value.hint)


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config().save_pretrained(tmp_path)
    for load in (load_config, lambda path: load_model(path, torch.float32)):
        with pytest.raises(ModelError, match="'t5', no causal language model"):
            load(tmp_path)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "no_such_model"}, "'no_such_model', no causal language model"),
        ({}, "None, no causal language model"),
        ({"model_type": "gpt2", "quantization_config": {"quant_method": "gptq"}}, "is quantised"),
        ({"model_type": "gpt2", "n_embd": "wide"}, "'gpt2', no causal language model"),
    ],
)
def test_a_config_that_means_nothing_is_one_line(
    config: dict[str, object], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=named) as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    path = write_family("gpt2", tmp_path)
    tensors = load_file(path / "model.safetensors")
    norm = tensors.pop("transformer.ln_f.weight")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 missing tensors, transformer\.ln_f\.weight"):
        load_model(path, torch.float32)
    whole = tensors | {"transformer.ln_f.weight": norm}
    save_file(whole | {"extra": norm.clone()}, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="1 unexpected tensors, extra"):
        load_model(path, torch.float32)
    (path / "model.safetensors").write_bytes(b"\x08\x00")
    with pytest.raises(ModelError, match="cannot be loaded by transformers"):
        load_model(path, torch.float32)


def test_only_native_models_can_be_trained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gpt2.*not native") as caught:
        load_decoder(write_family("gpt2", tmp_path), dtype=torch.float32)
    assert "llama, mistral, qwen2" in str(caught.value.hint)


def test_a_native_model_loads_without_transformers_and_torchs_compiler(tiny_model_dir: Path) -> None:
    program = (
        "import sys, torch; from pathlib import Path; from tessera_cli.models.loader import load_model;"
        f"path = Path({str(tiny_model_dir)!r}); load_model(path, torch.float32);"
        "load_model(path, torch.float32, quantization='int8');"
        "assert not {'transformers', 'torch._dynamo', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
