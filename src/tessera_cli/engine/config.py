"""What an engine is sized to; sizes that can never work are refused."""

from dataclasses import dataclass
from typing import Literal, get_args

from tessera_cli.errors import CapacityError, UsageError

SchedulingPolicy = Literal["fcfs", "priority"]
KVCacheDtype = Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"]


@dataclass(frozen=True)
class EngineConfig:
    """The sizes and policies that an engine is built with.

    `num_blocks` counts the physical KV blocks, the null block included; `block_size`, `max_model_len` (prompt
    and output of one sequence together) and `max_num_batched_tokens` (one step) count tokens; `max_num_seqs`
    counts the sequences that run at once. `scheduling_policy` "fcfs" goes by arrival alone, "priority" first
    by each request's number, the lower the sooner. `kv_cache_dtype` "auto" is the dtype of the weights.
    `num_kept_blocks` is how many cached blocks `BlockPool` keeps at first rather than take one that was never
    used; None keeps all.

    Raises:
        UsageError: a size below one, an unknown policy or dtype, or a prompt that could never be scheduled
            whole without chunked prefill.
        CapacityError: the pool cannot hold one sequence of `max_model_len` tokens.
    """

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    kv_cache_dtype: KVCacheDtype = "auto"
    num_kept_blocks: int | None = None

    def __post_init__(self) -> None:
        for name, least, why in (
            ("num_blocks", 2, ", the null block and another"),
            ("max_model_len", 2, ", prompt and output"),
            ("block_size", 1, ""),
            ("max_num_seqs", 1, ""),
            ("max_num_batched_tokens", 1, ""),
        ):
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            expected = f"a whole number, at least {least}{why}"
            require(name, repr(value), is_number and value >= least, expected)
        for name, choices in (("scheduling_policy", SchedulingPolicy), ("kv_cache_dtype", KVCacheDtype)):
            value = getattr(self, name)
            require(name, repr(value), value in get_args(choices), f"one of {', '.join(get_args(choices))}")
        kept = self.num_kept_blocks
        is_number = isinstance(kept, int) and not isinstance(kept, bool)
        is_valid = kept is None or (is_number and kept >= 0)
        require("num_kept_blocks", repr(kept), is_valid, "a whole number, at least 0, or None")
        needed = self.blocks_for(self.max_model_len)
        if self.num_usable_blocks < needed:
            raise CapacityError(
                f"max_model_len={self.max_model_len} needs {needed} usable KV blocks of"
                f" {self.block_size} tokens, and num_blocks={self.num_blocks} has"
                f" {self.num_usable_blocks} (block 0 is the null block)",
                hint="give the KV cache more memory, store it in a smaller dtype, or lower max_model_len"
                f" to at most {self.num_usable_blocks * self.block_size}",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise UsageError(
                f"without chunked prefill a prompt of up to max_model_len={self.max_model_len} tokens must"
                f" fit into one step, and max_num_batched_tokens is {self.max_num_batched_tokens}",
                hint=f"raise max_num_batched_tokens to {self.max_model_len}, lower max_model_len or enable"
                " chunked prefill",
            )

    @property
    def max_num_slots(self) -> int:
        """Sequences that run at once, each of which needs one token of a step's budget."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences can hold: all but the null block."""
        return self.num_blocks - 1

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one sequence occupy."""
        return -(-num_tokens // self.block_size)


def require(name: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise UsageError(f"{name}={value} is out of range", hint=f"{name} has to be {expected}", param=name)
