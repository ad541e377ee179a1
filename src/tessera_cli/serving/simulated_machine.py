"""A model on a GPU that need not be there: bytes, blocks, and what a step costs."""

from dataclasses import dataclass

from tessera_cli.errors import CapacityError, UsageError
from tessera_cli.models.config import ModelConfig
from tessera_cli.serving.cost_model import DEFAULT_STEP_OVERHEAD, Efficiency, RooflineCost
from tessera_cli.serving.gpus import Gpu

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
_SCALE_BYTES = 4  # a float32 for each token and head of an int8 cache, once for keys and once for values


@dataclass(frozen=True)
class KVCacheSize:
    """What one token holds in the KV cache, in bytes, and how many tokens are in a block."""

    bytes_per_token: int
    block_size: int

    @classmethod
    def of(cls, model: ModelConfig, dtype: str, block_size: int) -> "KVCacheSize":
        """The KV cache of `model` in `dtype`.

        Raises:
            UsageError: no such dtype.
        """
        num_bytes = model.kv_bytes_per_token(element_bytes(dtype, "--kv-cache-dtype"))
        if dtype == "int8":
            num_bytes += 2 * model.num_hidden_layers * model.num_key_value_heads * _SCALE_BYTES
        return cls(num_bytes, block_size)

    def num_blocks(self, memory: int) -> int:
        """KV blocks, the null block included, that fit into `memory` bytes.

        Raises:
            CapacityError: fewer than two do.
        """
        block_bytes = self.bytes_per_token * self.block_size
        if memory < 2 * block_bytes:
            raise CapacityError(
                f"{max(memory, 0):,} bytes for the KV cache do not hold two blocks of {block_bytes:,} bytes",
                hint="take a larger GPU or a smaller model, raise --kv-cache-memory or lower --block-size",
            )
        return memory // block_bytes


def element_bytes(dtype: str, option: str) -> int:
    """Bytes of one element.

    Raises:
        UsageError: no such dtype; the message names `option`.
    """
    if dtype not in ELEMENT_BYTES:
        raise UsageError(f"{option} {dtype!r} is not known", hint="use auto, " + ", ".join(ELEMENT_BYTES))
    return ELEMENT_BYTES[dtype]


def memory_beside_weights(gpu: Gpu, model: ModelConfig, dtype: str, utilization: float) -> int:
    """Bytes for the KV cache in `utilization` of the GPU's memory, activations not counted.

    Raises:
        UsageError: a share that is none.
        CapacityError: the weights alone do not fit.
    """
    if not 0 < utilization <= 1:
        raise UsageError(f"--gpu-memory-utilization {utilization} is no share", hint="such as 0.9")
    weights = model.num_parameters * element_bytes(dtype, "--dtype")
    memory = int(gpu.memory * utilization) - weights
    if memory <= 0:
        raise CapacityError(
            f"{weights / 1e9:.1f} GB of weights do not fit {utilization:.0%} of the {gpu.memory / 1e9:.0f} GB"
            f" of {gpu.name}",
            hint="take a larger GPU, a smaller model or a smaller --dtype",
        )
    return memory


def roofline(
    model: ModelConfig,
    gpu: Gpu,
    dtype: str,
    kv_cache: KVCacheSize,
    efficiency: Efficiency,
    step_overhead: float = DEFAULT_STEP_OVERHEAD,
) -> RooflineCost:
    """The cost of `model` in `dtype` on `gpu`; `step_overhead` is in seconds.

    Raises:
        UsageError: a dtype for which there are no figures.
    """
    if dtype not in ("bfloat16", "float16"):
        raise UsageError(
            f"the figures of {gpu.name} are for 16-bit weights, not {dtype}", hint="add --dtype bfloat16"
        )
    return RooflineCost(
        model,
        gpu,
        weight_bytes=element_bytes(dtype, "--dtype"),
        kv_bytes_per_token=kv_cache.bytes_per_token,
        efficiency=efficiency,
        step_overhead=step_overhead,
    )
