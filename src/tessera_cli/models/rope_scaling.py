"""How rotary embeddings are stretched for long contexts, as config.json says it; no tensors here."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from tessera_cli.errors import ModelError


@dataclass(frozen=True)
class LinearRope:
    """Positions divided by `factor` (arXiv 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class DynamicRope:
    """A base that grows with the sequence beyond `max_position_embeddings`, where Tessera never goes.

    Up to there it is the plain embedding, so `factor` only survives to be written again.
    """

    factor: float


@dataclass(frozen=True)
class Llama3Rope:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between them (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class YarnRope:
    """YaRN (arXiv 2309.00071): a ramp over dimensions, and cosine and sine times `attention_factor`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


RopeScaling = LinearRope | DynamicRope | Llama3Rope | YarnRope

_TYPES: dict[str, type[RopeScaling]] = {
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}
_PLAIN_KEYS = {"rope_type", "type", "rope_theta"}
_SCALING_KEYS = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}


def read_rope(raw: dict[str, Any], *, default_theta: float, where: str) -> tuple[float, RopeScaling | None]:
    """Theta and scaling of a config, in the spelling of transformers 5 or an older one.

    Raises:
        ModelError: a kind of scaling or a parameter of it that Tessera does not run.
        ArithmeticError, LookupError, TypeError, ValueError: a parameter is missing or no number.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta", raw.get("rope_theta"))
    theta = default_theta if theta is None else float(theta)
    if kind != "default" and kind not in _TYPES:
        raise ModelError(
            f"{where} scales its rotary embedding by {kind!r}, which Tessera does not run",
            hint="these run: default, " + ", ".join(_TYPES),
        )
    given = {key for key, value in rope.items() if value is not None}
    # 1.0, the whole head, is what all these families rotate.
    unknown = given - _PLAIN_KEYS - _SCALING_KEYS.get(kind, set())
    if "partial_rotary_factor" in unknown and rope["partial_rotary_factor"] == 1.0:
        unknown.remove("partial_rotary_factor")
    if unknown:
        raise ModelError(
            f"{where} has {min(unknown)} for its {kind} rotary embedding, which Tessera does not run"
        )
    return theta, None if kind == "default" else _read_scaling(kind, rope, raw)


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys that `read_rope` reads, spelled for transformers 5 and for most other tools."""
    if scaling is None:
        return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    kind = next(name for name, type_ in _TYPES.items() if isinstance(scaling, type_))
    parameters = {"rope_type": kind, **asdict(scaling)}
    return {
        "rope_theta": theta,
        "rope_scaling": parameters,
        "rope_parameters": {**parameters, "rope_theta": theta},
    }


def _read_scaling(kind: str, rope: dict[str, Any], raw: dict[str, Any]) -> RopeScaling:
    factor = float(rope["factor"])
    if not 1 <= factor < math.inf:
        raise ValueError(f"the rotary embedding is scaled by {factor}, it has to be at least 1")
    if kind == "linear":
        return LinearRope(factor)
    if kind == "dynamic":
        return DynamicRope(factor)
    # transformers lets a key beside the parameters win over one among them.
    original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = int(original or raw["max_position_embeddings"])
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        if not 0 < low < high < math.inf:
            raise ValueError(f"low_freq_factor {low} has to be below high_freq_factor {high}")
        return Llama3Rope(factor, low, high, original)
    return YarnRope(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=_attention_factor(factor, rope),
        beta_fast=float(rope.get("beta_fast") or 32),
        beta_slow=float(rope.get("beta_slow") or 1),
        truncate=bool(rope.get("truncate", True)),
    )


def _attention_factor(factor: float, rope: dict[str, Any]) -> float:
    """YaRN's 0.1 ln(factor) + 1, or the ratio of two such terms (DeepSeek's `mscale`), unless it is given."""
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = rope.get("mscale"), rope.get("mscale_all_dim")
    return scale(numerator) / scale(denominator) if numerator and denominator else scale(1.0)
