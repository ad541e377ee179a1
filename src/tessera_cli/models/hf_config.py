"""Hugging Face's `config.json` to the fields of `ModelConfig` and back.

A key is known and read, known to be without effect on a forward pass, or refused if its name says that it
might have one: what transformers would compute otherwise must not run as if it were plain.
"""

from typing import TYPE_CHECKING, Any

from tessera_cli.errors import ModelError
from tessera_cli.models.hf_families import FAMILIES, Fields
from tessera_cli.models.quantization import INT8_CONFIG, read_quantization
from tessera_cli.models.rope_scaling import read_rope, write_rope

if TYPE_CHECKING:
    from tessera_cli.models.config import ModelConfig

# Every family has these; the values are the only ones that run.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1, None),
    "tie_word_embeddings": (False, True),
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
    "quantization_config",
}
# They sound like mathematics and are none of a forward pass: training's, or marks that tools left.
_WITHOUT_EFFECT = {"attention_dropout", "is_llama_config", "output_attentions", "attn_implementation"}
# Some fields have an entry for each layer: a number from a damaged file must not be counted up to.
_MAX_LAYERS = 10_000
_SOUNDS_LIKE_MATHEMATICS = (
    *("rope", "rotary", "attn", "attention", "head", "norm", "bias", "scal", "multiplier", "window", "cap"),
    *("logit", "expert", "moe", "quant", "residual", "embed", "layer", "act", "mlp", "clip", "alibi", "lora"),
)


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
    depth = _whole(raw["num_hidden_layers"])
    if depth > _MAX_LAYERS:
        raise ModelError(f"{where} has num_hidden_layers={depth}, and no model has more than {_MAX_LAYERS}")
    heads = _whole(raw["num_attention_heads"])
    theta, scaling = read_rope(raw, default_theta=raw.get("default_theta", 10_000.0), where=where)
    return {
        "vocab_size": _whole(raw["vocab_size"]),
        "hidden_size": _whole(raw["hidden_size"]),
        "intermediate_size": _whole(raw["intermediate_size"]),
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(raw.get("num_key_value_heads") or heads),
        "head_dim": _whole(raw.get("head_dim") or _whole(raw["hidden_size"]) // heads),
        "rms_norm_eps": float(raw["rms_norm_eps"]),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": _whole(raw["max_position_embeddings"]),
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "bos_token_id": raw.get("bos_token_id"),
        "eos_token_ids": eos_token_ids(raw.get("eos_token_id")),
        "pad_token_id": raw.get("pad_token_id"),
        "dtype": str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        "quantization": read_quantization(raw, where),
        "model_type": raw["model_type"],
        **family.read(raw),
    }


def eos_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One, several or no end-of-sequence ids, as config.json may spell them."""
    if value is None:
        return ()
    return tuple(map(_whole, value if isinstance(value, list) else [value]))


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


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
        **({} if config.quantization == "none" else {"quantization_config": INT8_CONFIG}),
        **family.write(config),
    }
