"""What the native decoder is made of; no tensors here."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import ModelError
from tessera_cli.models import hf_config
from tessera_cli.models.quantization import Quantization
from tessera_cli.models.rope_scaling import RopeScaling

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder of the Llama family; the defaults are Llama 2's.

    Attributes:
        max_position_embeddings: in tokens.
        dtype: how the weights are stored that are not quantised.
        quantization: how the matrices are stored: "none" is in `dtype`.
        model_type: the family, by transformers' name.
        rope_scaling: how rotary frequencies are stretched for long contexts; None: not at all.
        qkv_bias: whether the projections to queries, keys and values have one; like `o_bias` and `mlp_bias`.
        qk_norm: what of queries and keys is normed before rotation: nothing, each head, or all heads at once.
        post_norm: norms stand after attention and MLP instead of before them.
        layer_windows: the sliding window of each layer in tokens, None for a layer without; empty: none has.
        layer_rotates: whether each layer rotates queries and keys; empty: all do.
        attention_scale: what q kᵀ is multiplied with; None: head_dim ** -0.5.
        embedding_multiplier: of embedded tokens.
        residual_multiplier: of what attention and MLP add to the residual.
        logits_divisor: of the head's products.
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
    quantization: Quantization = "none"
    model_type: str = "llama"
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "projection"] = "none"
    post_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    layer_rotates: tuple[bool, ...] = ()
    attention_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("layer_windows", "layer_rotates"):
            if len(getattr(self, name)) not in (0, self.num_hidden_layers):
                raise ValueError(f"{name} is not one value for each of {self.num_hidden_layers} layers")

    @classmethod
    def from_dir(cls, path: Path) -> "ModelConfig":
        """Read `path/config.json`, and the end-of-sequence ids of `generation_config.json` if it exists.

        Raises:
            ModelError: no readable config, or an architecture or variant that is not native.
        """
        return cls.from_hf(read_hf_config(path), where=str(path))

    @classmethod
    def unquantised(cls, path: Path) -> "ModelConfig":
        """As `from_dir`, for whoever trains weights or compares with them.

        Raises:
            ModelError: as `from_dir`, or the weights are quantised.
        """
        config = cls.from_dir(path)
        if config.quantization != "none":
            raise ModelError(
                f"{path} is quantised to {config.quantization}, which is for serving only",
                hint="take the model that it was made of",
            )
        return config

    @classmethod
    def from_hf(cls, raw: dict[str, Any], *, where: str) -> "ModelConfig":
        """Translate the keys of a Hugging Face config; `where` names it in errors.

        Raises:
            ModelError: an architecture or variant that is not native, or sizes that disagree.
        """
        hf_config.check_family(raw, where)
        try:
            config = cls(**hf_config.read_fields(raw, where))
            config._check(where)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ModelError(
                f"{where} has an incomplete or broken config.json: {type(error).__name__}: {error}"
            ) from error
        return config

    def to_hf(self) -> dict[str, Any]:
        """The keys of the `config.json` that `transformers.AutoModelForCausalLM` loads."""
        return hf_config.write_keys(self)

    def with_layers(self, layers: Sequence[int]) -> "ModelConfig":
        """The config of a decoder made of these layers, each keeping its window and its rotation."""
        windows, rotates = self.layer_windows, self.layer_rotates
        return replace(
            self,
            num_hidden_layers=len(layers),
            layer_windows=tuple(windows[layer] for layer in layers) if windows else (),
            layer_rotates=tuple(rotates[layer] for layer in layers) if rotates else (),
        )

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """How each layer attends."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        windows = self.layer_windows or (None,) * self.num_hidden_layers
        return tuple(AttentionLayer(heads, kv_heads, self.head_dim, scale, w, None) for w in windows)

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        query = self.num_attention_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        biases = (
            self.qkv_bias * (query + 2 * key_value)
            + self.o_bias * self.hidden_size
            + self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        )
        qk_norms = {"none": 0, "head": 2 * self.head_dim, "projection": query + key_value}[self.qk_norm]
        return self._num_layer_matmul_parameters + biases + qk_norms + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied embedding is counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * self.num_layer_parameters + self.hidden_size

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that a token is multiplied with: matrices of layers and head, no norms, no biases."""
        return self.num_hidden_layers * self._num_layer_matmul_parameters + self.vocab_size * self.hidden_size

    @property
    def _num_layer_matmul_parameters(self) -> int:
        query = self.num_attention_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        return self.hidden_size * (2 * query + 2 * key_value + 3 * self.intermediate_size)

    def flops_per_token(self) -> int:
        """Floating-point operations of a forward pass per token, attention over the context not counted."""
        return 2 * self.num_matmul_parameters

    def weight_bytes(self, itemsize: int, quantization: Quantization) -> int:
        """Bytes of all weights in memory, where those that are not quantised take `itemsize` each."""
        if quantization == "none":
            return self.num_parameters * itemsize
        num_embeddings = 1 if self.tie_word_embeddings else 2
        matrices = self.num_matmul_parameters + (num_embeddings - 1) * self.vocab_size * self.hidden_size
        query = self.num_attention_heads * self.head_dim
        key_value = self.num_key_value_heads * self.head_dim
        layer_scales = query + 2 * key_value + 2 * self.hidden_size + 2 * self.intermediate_size
        scales = self.num_hidden_layers * layer_scales + num_embeddings * self.vocab_size
        return matrices + 4 * scales + (self.num_parameters - matrices) * itemsize

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values that one token holds in the cache, over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * element_bytes

    def _check(self, where: str) -> None:
        sizes = [getattr(self, f.name) for f in fields(self) if f.type is int]
        windows = [window for window in self.layer_windows if window is not None]
        if min(*sizes, *windows) < 1:
            raise ModelError(f"{where} has a size below 1 in its config.json")
        # Infinity and NaN fail the comparison.
        if not (0 < self.rope_theta < math.inf and 0 <= self.rms_norm_eps < math.inf):
            raise ModelError(
                f"{where} has rope_theta={self.rope_theta} and rms_norm_eps={self.rms_norm_eps}, which make"
                " no finite numbers"
            )
        for name in ("embedding_multiplier", "residual_multiplier", "attention_scale", "logits_divisor"):
            value = getattr(self, name)
            if value is not None and not 0 < abs(value) < math.inf:
                raise ModelError(f"{where} has {name}={value}, which makes no finite numbers")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"{where}: {self.num_attention_heads} attention heads do not divide into "
                f"{self.num_key_value_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"{where}: head_dim {self.head_dim} is odd, rotary embedding needs it even")
        strange = [token for token in self.eos_token_ids if not 0 <= token < self.vocab_size]
        if strange:
            raise ModelError(
                f"{where} ends at token id {strange[0]}, and its ids go from 0 to {self.vocab_size - 1}",
                hint="mend eos_token_id in generation_config.json, or in config.json",
            )
        if self.dtype not in _DTYPES:
            raise ModelError(f"{where} stores weights as {self.dtype}", hint="use " + ", ".join(_DTYPES))


def read_hf_config(path: Path) -> dict[str, Any]:
    """`path/config.json`, with the end-of-sequence ids of `generation_config.json` where it names any.

    Raises:
        ModelError: a file is missing or cannot be read.
    """
    raw = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    return raw if eos is None else {**raw, "eos_token_id": eos}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}",
            hint="a model directory holds config.json, tokenizer.json and *.safetensors",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return raw
