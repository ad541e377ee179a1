"""From a model directory to an engine that is sized for it."""

from functools import partial
from pathlib import Path
from typing import TypedDict

import torch

from tessera_cli.engine.config import EngineConfig, KVCacheDtype, SchedulingPolicy
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.memory import device_memory, return_freed_memory
from tessera_cli.engine.sizing import (
    GPU_MEMORY_UTILIZATION,
    PoolSizing,
    check_utilization,
    select_device,
    select_max_model_len,
)
from tessera_cli.engine.structured_output import GrammarVocabulary
from tessera_cli.errors import UsageError
from tessera_cli.kernels.backend import build_product, select_backend
from tessera_cli.kernels.kv_cache import select_kv_cache_dtype
from tessera_cli.models.causal_lm import CausalLM
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.linear_layers import replace_products
from tessera_cli.models.loader import load_config, load_model, select_dtype, select_quantization
from tessera_cli.models.quantization import Quantization


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `load_engine`."""

    dtype: str
    quantization: str
    kv_cache_dtype: KVCacheDtype
    device: str
    block_size: int
    num_blocks: int | None
    kv_cache_memory: int | None
    gpu_memory_utilization: float
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    enable_prefix_caching: bool
    scheduling_policy: SchedulingPolicy
    attention_backend: str
    enforce_eager: bool


def load_engine(
    path: Path,
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    kv_cache_dtype: KVCacheDtype = EngineConfig.kv_cache_dtype,
    device: str = "auto",
    block_size: int = EngineConfig.block_size,
    num_blocks: int | None = None,
    kv_cache_memory: int | None = None,
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION,
    max_model_len: int | None = None,
    max_num_seqs: int = EngineConfig.max_num_seqs,
    max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens,
    enable_chunked_prefill: bool = EngineConfig.enable_chunked_prefill,
    enable_prefix_caching: bool = EngineConfig.enable_prefix_caching,
    scheduling_policy: SchedulingPolicy = EngineConfig.scheduling_policy,
    attention_backend: str = "auto",
    enforce_eager: bool = False,
) -> Engine:
    """Load the model directory `path` and size the KV cache for it.

    Args:
        path: config.json, safetensors, and tokenizer.json for structured output.
        dtype: of what is computed, and of weights that are not quantised; "auto" is float32 on a CPU, as
            stored elsewhere.
        quantization: of the matrices: "none", "int8", which quantises while loading, or "auto", as the
            checkpoint has them.
        kv_cache_dtype: of keys and values; "auto" is that of the weights.
        device: "auto" is CUDA where there is one.
        block_size: tokens per KV block.
        num_blocks: KV blocks, the null block included; instead of `kv_cache_memory`.
        kv_cache_memory: bytes of the KV cache; None is what `PoolSizing.blocks_from_free` says. A pool on a
            CPU that neither this nor `num_blocks` sizes takes memory for ended sequences sparingly: see
            `BlockPool`.
        gpu_memory_utilization: share of a GPU's memory for weights and KV cache, where the cache is given
            neither bytes nor blocks.
        max_model_len: tokens of one sequence; None is the model's maximum.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step.
        enable_chunked_prefill: whether a prompt may be spread over steps.
        enable_prefix_caching: whether beginnings that prompts have in common are computed once.
        scheduling_policy: "fcfs" or "priority".
        attention_backend: "auto" or a backend's name.
        enforce_eager: whether decode steps on CUDA run kernel by kernel, not as captured graphs.

    Raises:
        ModelError: the model is missing, broken or of another architecture.
        UsageError: an option has a value that means nothing.
        CapacityError: the sizes do not fit together.
        RunError: the graphs cannot be captured.
    """
    if num_blocks is not None and kv_cache_memory is not None:
        raise UsageError("num_blocks and kv_cache_memory both size the KV cache", hint="give one of them")
    check_utilization(gpu_memory_utilization)
    known = load_config(path)
    device = select_device(device)
    memory = device_memory(device)
    torch_dtype = select_dtype(dtype, known.dtype, device)
    stored_dtype = select_kv_cache_dtype(kv_cache_dtype, torch_dtype)
    max_model_len = select_max_model_len(max_model_len, known)
    chosen = select_quantization(quantization, known, path)
    select_backend(attention_backend, device, block_size=block_size)
    # What can be refused is refused before the weights are read. How the layers of a model of transformers
    # attend is known afterwards.
    model: CausalLM | None = None
    if isinstance(known, ModelConfig):
        layers = known.attention_layers
    else:
        model = load_model(path, torch_dtype, device)
        layers = model.attention_layers
    backend, _ = select_backend(attention_backend, device, layers=layers, block_size=block_size)
    pool = PoolSizing(layers, stored_dtype, block_size, max_model_len)
    num_kept_blocks: int | None = None
    if num_blocks is not None:
        num_blocks = pool.checked_blocks(num_blocks, device, memory)
    elif kv_cache_memory is not None:
        num_blocks = pool.blocks_from_bytes(kv_cache_memory, device, memory)
    else:
        num_blocks = pool.blocks_from_free(
            device,
            memory,
            weight_bytes=known.weight_bytes(torch_dtype.itemsize, chosen)
            if isinstance(known, ModelConfig)
            else known.num_parameters * torch_dtype.itemsize,
            max_num_seqs=max_num_seqs,
            utilization=gpu_memory_utilization,
        )
        if device == "cpu":  # where a block that was never used costs nothing
            num_kept_blocks = pool.num_full_blocks
    config = EngineConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        enable_prefix_caching=enable_prefix_caching,
        scheduling_policy=scheduling_policy,
        kv_cache_dtype=kv_cache_dtype,
        num_kept_blocks=num_kept_blocks,
    )
    return Engine(
        load_served_model(path, torch_dtype, device, chosen, backend) if model is None else model,
        config,
        attention_backend=attention_backend,
        enforce_eager=enforce_eager,
        grammar_vocabulary=GrammarVocabulary(
            path / "tokenizer.json", vocab_size=known.vocab_size, eos_token_ids=known.eos_token_ids
        ),
    )


def load_served_model(
    path: Path, dtype: torch.dtype, device: str, quantization: Quantization, backend: str
) -> CausalLM:
    """Load `path` for inference, with the compiled products that go with the attention `backend`.

    Raises:
        ModelError: the model is broken.
    """
    model = load_model(path, dtype, device, quantization)
    if isinstance(model, Decoder):
        replace_products(model, partial(build_product, backend))
    return_freed_memory()  # of weights as they were stored
    return model
