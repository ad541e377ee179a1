"""How a checkpoint's weights are quantised: what config.json says, and what is chosen; no tensors here.

Tessera's own form, "int8", has every matrix in int8 with a float32 scale for each output, the embedding with
one for each row; norms and biases stay as they are.
"""

from typing import Any, Literal

from tessera_cli.errors import ModelError

Quantization = Literal["none", "int8"]
QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8")

# The block of config.json under `quantization_config`.
INT8_CONFIG = {"quant_method": "tessera-int8", "bits": 8, "symmetric": True, "granularity": "output_channel"}


def read_quantization(raw: dict[str, Any], where: str) -> Quantization:
    """What a checkpoint's config.json says of its weights; `where` names it in errors.

    Raises:
        ModelError: they are quantised in a form that does not run here.
    """
    block = raw.get("quantization_config")
    if block is None:
        return "none"
    if block == INT8_CONFIG:
        return "int8"
    if not isinstance(block, dict):
        raise ModelError(f"{where} has quantization_config={block!r} in its config.json, which is no object")
    method = block.get("quant_method", "a method that it does not name")
    if method == INT8_CONFIG["quant_method"]:
        raise ModelError(
            f"{where} is {method} of another kind: {_differences(block)}",
            hint="quantise the model again with `tessera quantize`",
        )
    raise ModelError(
        f"{where} is quantised with {method}, which Tessera does not run",
        hint="take the weights that are not quantised; `tessera quantize` makes int8 of them",
    )


def _differences(block: dict[str, Any]) -> str:
    """The keys in which `block` is not `INT8_CONFIG`, as config.json has them."""
    keys = sorted(key for key in block.keys() | INT8_CONFIG.keys() if block.get(key) != INT8_CONFIG.get(key))
    return ", ".join(f"{key}={block[key]!r}" if key in block else f"no {key}" for key in keys)
