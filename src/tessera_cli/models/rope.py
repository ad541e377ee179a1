"""Rotary embeddings (arXiv 2104.09864), scaled or not."""

import math

import torch
from torch import Tensor

from tessera_cli.models.config import ModelConfig
from tessera_cli.models.rope_scaling import LinearRope, Llama3Rope, YarnRope

RotaryTable = tuple[Tensor, Tensor]


def inverse_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per token of each dimension pair, float32 [head_dim / 2] on the CPU, and the table's factor.

    The order of operations is transformers', whose float32 results trained the models.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if isinstance(scaling, LinearRope):
        return frequencies / scaling.factor, 1.0
    if isinstance(scaling, Llama3Rope):
        return _llama3(frequencies, scaling), 1.0
    if isinstance(scaling, YarnRope):
        return _yarn(config.rope_theta**exponents, config, scaling), scaling.attention_factor
    return frequencies, 1.0


def rotary_table(frequencies: Tensor, factor: float, positions: Tensor) -> RotaryTable:
    """Float32 cosines and sines `[num_tokens, 1, head_dim]` of `positions` `[num_tokens]`, times `factor`.

    The halves of a head are rotated against each other, as Llama checkpoints are stored; the sine carries the
    sign of the first half, so that `rotate` is two products and a roll.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat([cos, cos], -1)[:, None], torch.cat([-sin, sin], -1)[:, None]


def rotate(x: Tensor, table: RotaryTable) -> Tensor:
    """Rotate heads `[num_tokens, heads, head_dim]` by a `rotary_table`; the dtype of `x` is kept."""
    cos, sin = table
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def _llama3(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    # How often a pair of dimensions turns within the original context decides how much it is stretched.
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position_embeddings / wavelengths
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(powers: Tensor, config: ModelConfig, scaling: YarnRope) -> Tensor:
    def dimension(turns: float) -> float:
        """The dimension pair that turns this often within the original context."""
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    pairs = torch.arange(config.head_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
    return stretched / (scaling.factor * powers) + (1 - stretched) / powers
