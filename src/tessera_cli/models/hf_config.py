"""Hugging Face's `config.json`, family by family, to the fields of `ModelConfig` and back.

A key is known and read, known to be without effect on a forward pass, or refused if its name says that it
might have one: what transformers would compute otherwise must not run as if it were plain.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tessera_cli.errors import ModelError
from tessera_cli.models.rope_scaling import read_rope, write_rope

if TYPE_CHECKING:
    from tessera_cli.models.config import ModelConfig

Fields = dict[str, Any]

# Every family has these; the values are the only ones that run.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1, None),
    "tie_word_embeddings": (False, True),
    "quantization_config": (None,),
}
_READ = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "max_position_embeddings",
    "original_max_position_embeddings",
}
# They sound like mathematics and are none of a forward pass: training's, or marks that tools left.
_WITHOUT_EFFECT = {"attention_dropout", "is_llama_config", "output_attentions", "attn_implementation"}
_SOUNDS_LIKE_MATHEMATICS = (
    *("rope", "rotary", "attn", "attention", "head", "norm", "bias", "scal", "multiplier", "window", "cap"),
    *("logit", "expert", "moe", "quant", "residual", "embed", "layer", "act", "mlp", "clip", "alibi", "lora"),
)


@dataclass(frozen=True)
class _Family:
    """How one `model_type` differs from Llama 2.

    Attributes:
        architecture: the class that transformers computes it with.
        read: from the raw config, with `defaults` filled in, to the fields that differ.
        write: the keys that say these fields again.
        keys: what `read` reads.
        defaults: what transformers assumes where the config says nothing.
    """

    architecture: str
    read: Callable[[Fields], Fields]
    write: Callable[["ModelConfig"], Fields]
    keys: frozenset[str]
    defaults: Fields = field(default_factory=dict)


def check_family(raw: Fields, where: str) -> None:
    """Refuse what the native decoder does not compute.

    Raises:
        ModelError: another architecture, or a key or value that changes the mathematics.
    """
    family = FAMILIES.get(str(raw.get("model_type")))
    architectures = raw.get("architectures") or []
    if family is None or architectures not in ([], [family.architecture]):
        names = architectures if isinstance(architectures, list) else [architectures]
        named = ", ".join(map(str, names)) or "an unnamed architecture"
        raise ModelError(
            f"{where} is {named} (model_type {raw.get('model_type')!r}), which is not native",
            hint="native are " + ", ".join(FAMILIES) + "; only these can be distilled",
        )
    for key, allowed in _FIXED.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise ModelError(f"{where} has {key}={raw[key]!r}, which Tessera does not run")
    for key in sorted(set(raw) - _READ - set(_FIXED) - family.keys - _WITHOUT_EFFECT):
        # None, false and what is empty say that there is nothing; zero is a value. `_...` is bookkeeping.
        off = raw[key] is None or raw[key] is False or raw[key] in ({}, [])
        if not (off or key.startswith("_")) and any(word in key for word in _SOUNDS_LIKE_MATHEMATICS):
            raise ModelError(
                f"{where} has {key}={raw[key]!r}, which a {raw['model_type']} model is not known to have",
                hint="if it means nothing, remove it from config.json",
            )


def read_fields(raw: Fields, where: str) -> Fields:
    """The arguments of `ModelConfig` for a config that `check_family` accepts.

    Raises:
        ModelError: a rotary embedding that Tessera does not run.
        ArithmeticError, AttributeError, LookupError, TypeError, ValueError: a value is missing or nonsense.
    """
    family = FAMILIES[raw["model_type"]]
    raw = {**family.defaults, **raw}
    heads = int(raw["num_attention_heads"])
    theta, scaling = read_rope(raw, default_theta=raw.get("default_theta", 10_000.0), where=where)
    return {
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "intermediate_size": int(raw["intermediate_size"]),
        "num_hidden_layers": int(raw["num_hidden_layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        "rms_norm_eps": float(raw["rms_norm_eps"]),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": int(raw["max_position_embeddings"]),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_ids": eos_token_ids(raw.get("eos_token_id")),
        "pad_token_id": raw.get("pad_token_id"),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        "model_type": raw["model_type"],
        **family.read(raw),
    }


def eos_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One, several or no end-of-sequence ids, as config.json may spell them."""
    if value is None:
        return ()
    return tuple(map(int, value if isinstance(value, list) else [value]))


def write_keys(config: "ModelConfig") -> Fields:
    """What transformers reads as the same model."""
    family = FAMILIES[config.model_type]
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    if len(config.eos_token_ids) == 1:
        eos = config.eos_token_ids[0]
    return {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **write_rope(config.rope_theta, config.rope_scaling),
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": config.pad_token_id,
        "dtype": config.dtype,
        **family.write(config),
    }


def _flag(raw: Fields, key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise TypeError(f"{key}={value!r} is neither true nor false")
    return value


def _read_biases(raw: Fields) -> Fields:
    attention = _flag(raw, "attention_bias")
    return {"qkv_bias": attention, "o_bias": attention, "mlp_bias": _flag(raw, "mlp_bias")}


def _write_biases(config: "ModelConfig") -> Fields:
    return {"attention_bias": config.o_bias, "mlp_bias": config.mlp_bias}


def _windows(raw: Fields, in_layer: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: as `layer_types` says or, without it, where `in_layer` does."""
    depth = int(raw["num_hidden_layers"])
    types = raw.get("layer_types")
    if types is None:
        types = ["sliding_attention" if in_layer(layer) else "full_attention" for layer in range(depth)]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown or len(types) != depth:
        raise ValueError(
            f"layer_types has {len(types)} entries for {depth} layers, {min(unknown, default='')}"
        )
    if "sliding_attention" not in types:
        return ()
    window = int(raw["sliding_window"])
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _write_windows(config: "ModelConfig") -> Fields:
    windows = config.layer_windows or (None,) * config.num_hidden_layers
    used = next((window for window in windows if window is not None), None)
    return {
        "use_sliding_window": used is not None,
        "sliding_window": used,
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }


def _read_mistral(raw: Fields) -> Fields:
    window = raw["sliding_window"]
    return {"layer_windows": () if window is None else (int(window),) * int(raw["num_hidden_layers"])}


def _write_mistral(config: "ModelConfig") -> Fields:
    return {"sliding_window": config.layer_windows[0] if config.layer_windows else None}


def _read_qwen(raw: Fields) -> Fields:
    # Qwen names a window even where it is switched off.
    if not _flag(raw, "use_sliding_window"):
        raw = {**raw, "sliding_window": None}
    first = raw["max_window_layers"]
    used = raw["sliding_window"] is not None
    return {"layer_windows": _windows(raw, lambda layer: used and layer >= first)}


def _read_smollm3(raw: Fields) -> Fields:
    depth, interval = int(raw["num_hidden_layers"]), int(raw["no_rope_layer_interval"])
    rotates = raw.get("no_rope_layers")  # 1 for a layer that rotates, whatever the name says
    if rotates is None:
        rotates = [(layer + 1) % interval for layer in range(depth)]
    if len(rotates) < depth:
        raise ValueError(f"no_rope_layers has {len(rotates)} entries for {depth} layers")
    flags = tuple(map(bool, rotates[:depth]))
    used = _flag(raw, "use_sliding_window") and raw.get("sliding_window") is not None
    windows = _windows(raw, lambda layer: used and not flags[layer])
    return {**_read_biases(raw), "layer_rotates": () if all(flags) else flags, "layer_windows": windows}


def _write_smollm3(config: "ModelConfig") -> Fields:
    rotates = config.layer_rotates or (True,) * config.num_hidden_layers
    return {
        **_write_biases(config),
        **_write_windows(config),
        "no_rope_layers": list(map(int, rotates)),
    }


_GRANITE_FIELDS = {
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_divisor",
}
_BIAS_KEYS = frozenset({"attention_bias", "mlp_bias"})
_WINDOW_KEYS = frozenset({"use_sliding_window", "sliding_window", "layer_types", "max_window_layers"})
_QWEN_DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: dict[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", _read_biases, _write_biases, _BIAS_KEYS),
    "mistral": _Family(
        "MistralForCausalLM",
        _read_mistral,
        _write_mistral,
        frozenset({"sliding_window"}),
        {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": _Family(
        "Qwen2ForCausalLM",
        lambda raw: {**_read_qwen(raw), "qkv_bias": True},
        _write_windows,
        _WINDOW_KEYS,
        _QWEN_DEFAULTS,
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        lambda raw: {**_read_qwen(raw), **_read_biases(raw), "qk_norm": "head"},
        lambda config: {**_write_windows(config), "attention_bias": config.o_bias},
        _WINDOW_KEYS | {"attention_bias"},
        {**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    "smollm3": _Family(
        "SmolLM3ForCausalLM",
        _read_smollm3,
        _write_smollm3,
        _BIAS_KEYS | _WINDOW_KEYS | {"no_rope_layers", "no_rope_layer_interval"},
        {
            "num_key_value_heads": 4,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "default_theta": 2_000_000.0,
        },
    ),
    "granite": _Family(
        "GraniteForCausalLM",
        lambda raw: {
            **_read_biases(raw),
            **{ours: float(raw.get(theirs, 1.0)) for theirs, ours in _GRANITE_FIELDS.items()},
        },
        lambda config: {
            **_write_biases(config),
            **{theirs: getattr(config, ours) for theirs, ours in _GRANITE_FIELDS.items()},
        },
        _BIAS_KEYS | set(_GRANITE_FIELDS),
    ),
    "olmo2": _Family(
        "Olmo2ForCausalLM",
        lambda raw: {**_read_biases(raw), "qk_norm": "projection", "post_norm": True},
        lambda config: {"attention_bias": config.o_bias},
        frozenset({"attention_bias"}),
    ),
}
