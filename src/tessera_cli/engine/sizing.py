"""How large an engine may be: a pool of KV blocks from what memory is free, and what that pool holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tessera_cli.attention import AttentionLayer
from tessera_cli.engine.config import EngineConfig, require
from tessera_cli.engine.memory import DeviceMemory
from tessera_cli.errors import CapacityError, UsageError
from tessera_cli.kernels.kv_cache import KV_CACHE_DTYPES, kv_block_bytes
from tessera_cli.models.causal_lm import CausalLMConfig

CPU_MEMORY_SHARE = 0.5  # of what is free beside the weights; the rest is the machine's other work
GPU_MEMORY_UTILIZATION = 0.9  # of all memory; the rest is for activations
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


@dataclass(frozen=True)
class PoolSizing:
    """Turns memory into KV blocks, the null block included, and refuses pools that can never work.

    Attributes:
        layers: what is stored for each token.
        kv_cache_dtype: how it is stored.
        block_size: tokens of a block.
        max_model_len: tokens of the longest sequence, which the pool has to hold.
    """

    layers: Sequence[AttentionLayer]
    kv_cache_dtype: torch.dtype
    block_size: int
    max_model_len: int

    def __post_init__(self) -> None:
        require("block_size", self.block_size, self.block_size >= 1, "at least 1")

    @property
    def num_full_blocks(self) -> int:
        """Blocks of one sequence of `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)

    def bytes_for(self, num_sequences: int, dtype: torch.dtype | None = None) -> int:
        """Bytes of a pool for so many sequences of `max_model_len` tokens, in `dtype` or the pool's own."""
        num_blocks = num_sequences * self.num_full_blocks + 1
        return num_blocks * self._block_bytes(dtype or self.kv_cache_dtype)

    def blocks_from_free(
        self, device: str, memory: DeviceMemory, *, weight_bytes: int, max_num_seqs: int, utilization: float
    ) -> int:
        """Blocks for a pool that nobody has sized.

        On a CPU it takes `CPU_MEMORY_SHARE` of what is free when the weights are loaded; on a GPU what the
        weights and other processes leave of the share `utilization` of all memory. Never more than
        `max_num_seqs` sequences of full length can use.

        Args:
            device: where the pool will be.
            memory: of that device, before the weights are loaded.
            weight_bytes: of the weights.
            max_num_seqs: sequences that run at once.
            utilization: as `check_utilization` allows it; not used on a CPU.

        Raises:
            CapacityError: the pool does not hold one sequence of `max_model_len` tokens.
        """
        if device == "cpu":
            budget = int((memory.free - weight_bytes) * CPU_MEMORY_SHARE)
        else:
            budget = int(memory.total * utilization) - (memory.total - memory.free) - weight_bytes
        return self.blocks_from_bytes(min(max(budget, 0), self.bytes_for(max_num_seqs)), device, memory)

    def blocks_from_bytes(self, kv_cache_memory: int, device: str, memory: DeviceMemory) -> int:
        """Blocks that fit into `kv_cache_memory` bytes.

        Raises:
            CapacityError: they do not hold one sequence of `max_model_len` tokens, or the device has less.
        """
        num_blocks = kv_cache_memory // self._block_bytes(self.kv_cache_dtype)
        held = max(num_blocks - 1, 0) * self.block_size
        if held < self.max_model_len:
            options = [f"raise kv_cache_memory to at least {_size(self.bytes_for(1))}"]
            if held >= 2:
                options.append(f"lower max_model_len to at most {held}")
            options += self._smaller_dtypes(kv_cache_memory)
            raise CapacityError(
                f"a KV cache of {kv_cache_memory} bytes holds {held} tokens, and one sequence has up to"
                f" max_model_len={self.max_model_len}",
                hint=" or ".join(options),
            )
        return self.checked_blocks(num_blocks, device, memory)

    def checked_blocks(self, num_blocks: int, device: str, memory: DeviceMemory) -> int:
        """`num_blocks`, if the device's memory is larger than they are.

        Raises:
            UsageError: there is no usable block among them.
            CapacityError: they do not hold one sequence of `max_model_len` tokens, or the device has less.
        """
        require("num_blocks", num_blocks, num_blocks >= 2, "at least 2, the null block and another")
        held = (num_blocks - 1) * self.block_size
        if held < self.max_model_len:
            raise CapacityError(
                f"num_blocks={num_blocks} hold {held} tokens, and one sequence has up to"
                f" max_model_len={self.max_model_len}",
                hint=f"raise num_blocks to at least {self.num_full_blocks + 1}"
                f" or lower max_model_len to at most {held}",
            )
        block_bytes = self._block_bytes(self.kv_cache_dtype)
        if num_blocks * block_bytes > memory.total:
            raise CapacityError(
                f"a KV cache of {num_blocks} blocks, {_size(num_blocks * block_bytes)}, does not fit into the"
                f" memory of {device}, {_size(memory.total)}",
                hint="lower kv_cache_memory or num_blocks;"
                f" {memory.total // block_bytes} blocks are the most",
            )
        return num_blocks

    def _block_bytes(self, dtype: torch.dtype) -> int:
        return kv_block_bytes(self.layers, block_size=self.block_size, dtype=dtype)

    def _smaller_dtypes(self, kv_cache_memory: int) -> list[str]:
        """The remedy of storing less, where that is enough."""
        fitting = [name for name, d in KV_CACHE_DTYPES.items() if self.bytes_for(1, d) <= kv_cache_memory]
        return [f"set kv_cache_dtype to {' or '.join(fitting)}"] if fitting else []


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
        hint = f"use auto or cpu; torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        raise UsageError(f"device {name!r} cannot be used here", hint=hint) from error
    return name


def check_utilization(utilization: float) -> None:
    """Refuse, with a UsageError, what is no share of a GPU's memory, whether or not it will be needed."""
    require("gpu_memory_utilization", utilization, 0 < utilization <= 1, "above 0 and at most 1")


def select_max_model_len(given: int | None, model: CausalLMConfig) -> int:
    """The longest sequence, in tokens: the given length, or the model's maximum; never another one.

    Raises:
        CapacityError: the given length is more than the model's positions.
    """
    if given is None:
        return model.max_position_embeddings
    check_positions(given, model)
    return given


def check_positions(max_model_len: int, model: CausalLMConfig) -> None:
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


def _size(num_bytes: int) -> str:
    """A size as options take it; in MiB rounded up, where it is many."""
    return f"{num_bytes} bytes" if num_bytes < 10 << 20 else f"{-(-num_bytes // (1 << 20))}MiB"
