"""The native families: how each `model_type` of Hugging Face differs from Llama 2."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tessera_cli.models.config import ModelConfig

Fields = dict[str, Any]


@dataclass(frozen=True)
class Family:
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

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", _read_biases, _write_biases, _BIAS_KEYS),
    "mistral": Family(
        "MistralForCausalLM",
        _read_mistral,
        _write_mistral,
        frozenset({"sliding_window"}),
        {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        lambda raw: {**_read_qwen(raw), "qkv_bias": True},
        _write_windows,
        _WINDOW_KEYS,
        _QWEN_DEFAULTS,
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        lambda raw: {**_read_qwen(raw), **_read_biases(raw), "qk_norm": "head"},
        lambda config: {**_write_windows(config), "attention_bias": config.o_bias},
        _WINDOW_KEYS | {"attention_bias"},
        {**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    "smollm3": Family(
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
    "granite": Family(
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
    "olmo2": Family(
        "Olmo2ForCausalLM",
        lambda raw: {**_read_biases(raw), "qk_norm": "projection", "post_norm": True},
        lambda config: {"attention_bias": config.o_bias},
        frozenset({"attention_bias"}),
    ),
}
