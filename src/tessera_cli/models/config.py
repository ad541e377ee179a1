"""What a decoder is made of, read from a Hugging Face `config.json`; no tensors here."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera_cli.errors import ModelError

# What `config.json` may say of these keys; any other value changes the mathematics.
_LLAMA_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "tie_word_embeddings": (False, True),
    "quantization_config": (None,),
}
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a Llama-architecture decoder.

    `dtype` is how the weights are stored; `max_position_embeddings` is in tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    dtype: str

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Read `path/config.json`, and the end-of-sequence ids of `generation_config.json` if it exists.

        Raises:
            ModelError: no readable config, or an architecture or variant that Tessera does not run.
        """
        raw = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        if generation.exists():
            raw = {
                **raw,
                **{k: v for k, v in _read_json(generation).items() if k == "eos_token_id" and v is not None},
            }
        return cls.from_hf(raw, where=str(path))

    @classmethod
    def from_hf(cls, raw: dict[str, Any], *, where: str) -> "ModelConfig":
        """Translate the keys of a Hugging Face config; `where` names it in errors.

        Raises:
            ModelError: an architecture or variant that Tessera does not run, or sizes that disagree.
        """
        architectures = raw.get("architectures") or []
        if raw.get("model_type") != "llama" or architectures not in ([], ["LlamaForCausalLM"]):
            names = architectures if isinstance(architectures, list) else [architectures]
            named = ", ".join(map(str, names)) or "an unnamed architecture"
            raise ModelError(
                f"{where} is {named} (model_type {raw.get('model_type')!r}), which Tessera does not run",
                hint="the Llama architecture (`LlamaForCausalLM`) is supported: Llama 2, SmolLM2 and kin",
            )
        for key, allowed in _LLAMA_FIXED.items():
            if raw.get(key, allowed[0]) not in allowed:
                raise ModelError(f"{where} has {key}={raw[key]!r}, which Tessera does not run")
        try:
            return cls._from_llama(raw, where)
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelError(
                f"{where} has an incomplete or broken config.json: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _from_llama(cls, raw: dict[str, Any], where: str) -> "ModelConfig":
        heads = int(raw["num_attention_heads"])
        eos = raw.get("eos_token_id")
        config = cls(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope_theta=_rope_theta(raw, where),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(map(int, eos if isinstance(eos, list) else [eos])),
            pad_token_id=raw.get("pad_token_id"),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )
        config._check(where)
        return config

    def _check(self, where: str) -> None:
        sizes = (
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_hidden_layers,
            self.head_dim,
        )
        if min(*sizes, self.num_attention_heads, self.num_key_value_heads, self.max_position_embeddings) < 1:
            raise ModelError(f"{where} has a size below 1 in its config.json")
        if not (0 < self.rope_theta < math.inf and 0 <= self.rms_norm_eps < math.inf):
            raise ModelError(
                f"{where} has rope_theta={self.rope_theta} and rms_norm_eps={self.rms_norm_eps}, which make"
                " no finite numbers"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"{where}: {self.num_attention_heads} attention heads do not divide into "
                f"{self.num_key_value_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"{where}: head_dim {self.head_dim} is odd, rotary embedding needs it even")
        if self.dtype not in _DTYPES:
            raise ModelError(f"{where} stores weights as {self.dtype}", hint="use " + ", ".join(_DTYPES))

    def to_hf(self) -> dict[str, Any]:
        """The keys of the `config.json` that `transformers.AutoModelForCausalLM` loads."""
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            # Both spellings: transformers 5 writes `rope_parameters`, most other tools read `rope_theta`.
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
            "dtype": self.dtype,
        }

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        query = self.num_attention_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        attention = self.hidden_size * (2 * query + 2 * key_value)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied embedding is counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * self.num_layer_parameters + self.hidden_size

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that a token is multiplied with: the layers' matrices and the head, not the norms."""
        layer = self.num_layer_parameters - 2 * self.hidden_size
        return self.num_hidden_layers * layer + self.vocab_size * self.hidden_size

    def flops_per_token(self) -> int:
        """Floating-point operations of a forward pass per token, attention over the context not counted."""
        return 2 * self.num_matmul_parameters

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values that one token holds in the cache, over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * element_bytes


def _rope_theta(raw: dict[str, Any], where: str) -> float:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ModelError(f"{where} scales its rotary embedding by {kind!r}, which Tessera does not run")
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    return 10_000.0 if theta is None else float(theta)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}",
            hint="a model directory holds config.json, tokenizer.json and *.safetensors",
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return raw
