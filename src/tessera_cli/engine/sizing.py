"""How large an engine may be: blocks from bytes, sequence length from blocks, and what that holds."""

from dataclasses import dataclass

import torch

from tessera_cli.engine.config import EngineConfig
from tessera_cli.errors import CapacityError, UsageError
from tessera_cli.models.config import ModelConfig

DEFAULT_KV_CACHE_MEMORY = 1 << 30  # bytes
_DEVICE_HINT = "use auto, cpu or cuda"


@dataclass(frozen=True)
class Capacity:
    """What a KV cache holds: usable blocks, tokens, and sequences of `max_model_len` tokens."""

    num_blocks: int
    num_tokens: int
    max_model_len: int
    num_full_sequences: int

    @classmethod
    def of(cls, config: EngineConfig) -> "Capacity":
        """The capacity of an engine of these sizes."""
        usable = config.num_usable_blocks
        num_full_sequences = usable // config.blocks_for(config.max_model_len)
        return cls(usable, usable * config.block_size, config.max_model_len, num_full_sequences)

    def __str__(self) -> str:
        return (
            f"{self.num_blocks} blocks, {self.num_tokens} tokens, "
            f"{self.num_full_sequences} sequences of {self.max_model_len} tokens"
        )


def select_device(name: str) -> str:
    """The torch device for `name`, "cpu" or a CUDA device; "auto" is CUDA where there is one, else the CPU.

    Raises:
        UsageError: there is no such device here.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and name.partition(":")[0] != "cuda":
        raise UsageError(f"device {name!r} cannot be used here", hint=_DEVICE_HINT)
    try:
        torch.empty(0, device=name)
    # An unknown device is a RuntimeError, one that this build of torch lacks an AssertionError.
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {name!r} cannot be used here", hint=_DEVICE_HINT) from error
    return name


def num_blocks_for(kv_cache_memory: int, model: ModelConfig, *, element_bytes: int, block_size: int) -> int:
    """KV blocks, the null block included, that fit into `kv_cache_memory` bytes.

    Raises:
        UsageError: `block_size` is below one token.
        CapacityError: fewer than two blocks fit.
    """
    _check_block_size(block_size)
    block_bytes = model.kv_bytes_per_token(element_bytes) * block_size
    num_blocks = kv_cache_memory // block_bytes
    if num_blocks < 2:
        raise CapacityError(
            f"a KV cache of {kv_cache_memory} bytes does not hold two blocks of {block_bytes} bytes",
            hint="raise kv_cache_memory or lower block_size",
        )
    return num_blocks


def select_max_model_len(
    given: int | None, model: ModelConfig, *, num_blocks: int, block_size: int
) -> tuple[int, list[str]]:
    """The longest sequence, in tokens, and what the user has to be told about it.

    None becomes the model's maximum, lowered with a note to what the cache holds; a given length is never
    changed.

    Raises:
        UsageError: `block_size` is below one token.
        CapacityError: the given length is more than the model's positions, or there is no usable block.
    """
    _check_block_size(block_size)
    if num_blocks < 2:
        raise CapacityError(
            f"num_blocks={num_blocks} leaves no block to use",
            hint="block 0 is the null block; give at least 2",
        )
    if given is not None:
        check_positions(given, model)
        return given, []
    held = (num_blocks - 1) * block_size
    if held >= model.max_position_embeddings:
        return model.max_position_embeddings, []
    change = f"from {model.max_position_embeddings} to {held}"
    return held, [f"max_model_len lowered {change}, which is what the KV cache holds"]


def check_positions(max_model_len: int, model: ModelConfig) -> None:
    """Refuse a length that the model has no positions for.

    Raises:
        CapacityError: `max_model_len` is more than the model's positions.
    """
    if max_model_len > model.max_position_embeddings:
        raise CapacityError(
            f"max_model_len={max_model_len} is more than the model's"
            f" {model.max_position_embeddings} positions",
            hint=f"lower max_model_len to {model.max_position_embeddings}",
        )


def _check_block_size(block_size: int) -> None:
    if block_size < 1:
        raise UsageError(f"block_size={block_size} is out of range", hint="block_size has to be at least 1")
