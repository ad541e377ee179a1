import json
import math
from pathlib import Path

import pytest

from tessera_cli.errors import ModelError
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.rope_scaling import YarnRope

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


def test_the_two_spellings_of_rope_are_one() -> None:
    old = ModelConfig.from_hf(LLAMA | {"rope_theta": 5e4}, where="m")
    new = ModelConfig.from_hf(
        LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, where="m"
    )
    assert old == new
    assert old.rope_theta == 5e4


def test_a_config_survives_its_own_json() -> None:
    config = ModelConfig.from_hf(LLAMA | {"eos_token_id": [2, 3], "tie_word_embeddings": True}, where="m")
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())), where="m") == config


@pytest.mark.parametrize(("eos", "expected"), [(None, ()), (2, (2,)), (0, (0,)), ([2, 3], (2, 3))])
def test_every_end_of_sequence_id_counts(eos: object, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": eos}, where="m").eos_token_ids == expected


def test_generation_config_has_the_last_word_on_eos(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "bos_token_id": 9}))
    config = ModelConfig.from_dir(tmp_path)
    assert config.eos_token_ids == (2, 7)
    assert config.bos_token_id is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "incomplete.*factor"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
        ({"eos_token_id": -1}, "token id -1"),
        ({"eos_token_id": [2, 100]}, "token id 100"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "scaled by 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "has beta_fast for its linear"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"clip_qkv": 1.0}, "clip_qkv=1.0"),
        ({"use_alibi": 1}, "use_alibi=1"),
        ({"num_key_value_heads": 4}, "4 key-value heads"),
        ({"hidden_size": None}, "incomplete"),
        ({"vocab_size": 0}, "below 1"),
        ({"num_hidden_layers": 2.9}, "2.9 is no whole number"),
        ({"vocab_size": True}, "True is no whole number"),
        ({"eos_token_id": 2.5}, "2.5 is no whole number"),
        ({"head_dim": 7}, "odd"),
        ({"torch_dtype": "float64"}, "float64"),
        ({"model_type": "mistral"}, "LlamaForCausalLM .model_type 'mistral'"),
        ({"architectures": "MixtralForCausalLM"}, "MixtralForCausalLM"),
        ({"architectures": [None]}, "None"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised with fp8"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false'"),
        ({"rope_parameters": [1]}, "broken"),
        ({"vocab_size": float("inf")}, "broken"),
        ({"eos_token_id": ["x"]}, "broken"),
        ({"rope_theta": 0.0}, "rope_theta=0.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ],
)
def test_what_would_run_wrong_is_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf(LLAMA | change, where="m")


def test_broken_files_are_model_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.from_dir(tmp_path)
    for text in ("{", "[]", '"llama"', "[" * 100_000, '{"model_type": ["llama"]}'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError):
            ModelConfig.from_dir(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_as_transformers_does(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {k: v for k, v in LLAMA.items() if k not in ("architectures", "model_type")}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
    config = ModelConfig.from_hf(LLAMA | {"tie_word_embeddings": tied}, where="m")
    assert config.num_parameters == sum(p.numel() for p in model.parameters())
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and (tied or "embed" not in n)]
    assert config.num_matmul_parameters == sum(p.numel() for p in matrices)
    assert config.kv_bytes_per_token(4) == 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize(
    ("rope", "attention_factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"attention_factor": 0.5, "mscale": 2.0, "mscale_all_dim": 1.0}, 0.5),
    ],
)
def test_yarn_scales_attention_as_given_or_by_its_own_rule(
    rope: dict[str, float], attention_factor: float
) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, **rope}
    config = ModelConfig.from_hf(LLAMA | {"rope_parameters": scaling}, where="m")
    assert isinstance(config.rope_scaling, YarnRope)
    assert config.rope_scaling.attention_factor == pytest.approx(attention_factor)
    assert config.rope_scaling.original_max_position_embeddings == 64
    assert ModelConfig.from_hf(config.to_hf(), where="m") == config


def test_marks_without_effect_are_no_fault() -> None:
    marks = {"_attn_implementation_autoset": True, "rope_interleaved": False, "pruned_heads": {}, "x": 1}
    assert ModelConfig.from_hf(LLAMA | marks, where="m") == ModelConfig.from_hf(LLAMA, where="m")
