"""From a model directory to an engine that is sized for it."""

from pathlib import Path
from typing import TypedDict

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sizing import (
    DEFAULT_KV_CACHE_MEMORY,
    num_blocks_for,
    select_device,
    select_max_model_len,
)
from tessera_cli.kernels.backend import select_backend
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.loader import load_decoder, select_dtype


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `load_engine`."""

    dtype: str
    device: str
    block_size: int
    num_blocks: int | None
    kv_cache_memory: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    attention_backend: str


def load_engine(
    path: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    block_size: int = EngineConfig.block_size,
    num_blocks: int | None = None,
    kv_cache_memory: int = DEFAULT_KV_CACHE_MEMORY,
    max_model_len: int | None = None,
    max_num_seqs: int = EngineConfig.max_num_seqs,
    max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens,
    enable_chunked_prefill: bool = EngineConfig.enable_chunked_prefill,
    attention_backend: str = "auto",
) -> Engine:
    """Load the model directory `path` and size the KV cache for it.

    Args:
        path: config.json, safetensors.
        dtype: of weights and KV cache; "auto" is float32 on a CPU, as stored elsewhere.
        device: "auto" is CUDA where there is one.
        block_size: tokens per KV block.
        num_blocks: KV blocks, the null block included; instead of `kv_cache_memory`.
        kv_cache_memory: bytes of the KV cache.
        max_model_len: tokens of one sequence; None is the model's maximum, or what the cache holds.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        enable_chunked_prefill: whether a prompt may be spread over steps.
        attention_backend: "auto" or a backend's name.

    Raises:
        ModelError: the model is missing, broken or of another architecture.
        UsageError: an option has a value that means nothing.
        CapacityError: the sizes do not fit together.
    """
    model = ModelConfig.from_dir(path)
    device = select_device(device)
    torch_dtype = select_dtype(dtype, model.dtype, device)
    if num_blocks is None:
        num_blocks = num_blocks_for(
            kv_cache_memory, model, element_bytes=torch_dtype.itemsize, block_size=block_size
        )
    max_model_len, notes = select_max_model_len(
        max_model_len, model, num_blocks=num_blocks, block_size=block_size
    )
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
    )
    # A wrong name is told before the weights are read.
    select_backend(attention_backend, device)
    decoder = load_decoder(path, dtype=torch_dtype, device=device)
    return Engine(decoder, config, attention_backend=attention_backend, notes=notes)
