"""Paged attention on CUDA devices, by kernels that are compiled when first used (docs/cuda-kernel.md)."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import UsageError
from tessera_cli.kernels.backend import COMPILED_BLOCK_SIZES, NULL_BLOCK, AttentionMetadata
from tessera_cli.kernels.cuda_arguments import AttentionArguments, CopyArguments, WriteArguments, WriteSide
from tessera_cli.kernels.cuda_plan import StepPlan, layer_kernels, plan_step
from tessera_cli.kernels.kv_cache import PagedTensor

if TYPE_CHECKING:
    from tessera_cli.kernels.cuda_launch import CudaKernels

_MIN_CAPABILITY = (8, 0)
_COPY = "copy_blocks"
_COPY_THREADS = 256
_WRITE_WARPS = 4
_ALIGNMENT = 16  # bytes, of asynchronous copies


def find_obstacle(device: str = "cuda") -> str | None:
    """Why the kernels do not run on `device`, in a few words; None if they do."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return "the kernels need compute capability 8.0, this device has {}.{}".format(*capability)
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "cuda-bindings is not installed"
    return None


def load_kernels(names: Sequence[str], device: torch.device) -> "CudaKernels":
    """The kernels `names`, ready to be launched on `device`."""
    from tessera_cli.kernels.cuda_launch import CudaKernels

    return CudaKernels(names, device)


class CudaAttention:
    """Like `ReferenceAttention`, by CUDA kernels; takes the same arguments and has the same methods.

    Rows of `attend`'s result past the last token of `query_start_loc`, which a captured CUDA graph may have,
    are not written. Constructed under `torch.use_deterministic_algorithms`, it gives a token the same bits
    whatever its neighbours in the batch are and whatever chunk it comes in; prefill is then slower.

    Raises:
        UsageError: the kernels lack a head size, dtype or block size.
        RunError: the kernels cannot be compiled or loaded.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if block_size not in COMPILED_BLOCK_SIZES:
            raise UsageError(
                f"the CUDA kernels have no blocks of {block_size} tokens",
                hint=f"use one of {', '.join(map(str, COMPILED_BLOCK_SIZES))}",
            )
        if num_blocks * block_size >= 2**31:
            raise UsageError(
                f"{num_blocks} blocks of {block_size} tokens are more than the CUDA kernels count"
            )
        self.layers = tuple(layers)
        self._device = torch.device(device)
        self._block_size = block_size
        self._dtype = dtype
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._layer_kernels = [layer_kernels(layer, dtype, kv_cache_dtype) for layer in layers]
        names = {name for kernels in self._layer_kernels for name in kernels.names}
        self._kernels = load_kernels(sorted({*names, _COPY}), self._device)

        def paged(layer: AttentionLayer) -> PagedTensor:
            return PagedTensor(
                layer, num_blocks=num_blocks, block_size=block_size, dtype=kv_cache_dtype, device=device
            )

        self.key_caches = [paged(layer) for layer in layers]
        self.value_caches = [paged(layer) for layer in layers]
        tensors = [
            tensor
            for cache in (*self.key_caches, *self.value_caches)
            for tensor in (cache.elements, cache.scales)
            if tensor is not None
        ]
        self._copied = self._int64([tensor.data_ptr() for tensor in tensors])
        self._bytes_of_block = self._int64([tensor[0].nbytes for tensor in tensors])

    def attend(self, metadata: AttentionMetadata, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store this step's keys and values, then attend causally over each sequence's blocks.

        Args:
            metadata: the step's; of its tensors nothing is read on the host.
            layer: index of the layer, from 0.
            q: [num_tokens, num_heads, head_dim], rotated.
            k: [num_tokens, num_kv_heads, head_dim], rotated.
            v: [num_tokens, num_kv_heads, head_dim].

        Returns:
            Attention as `dense_attention` defines it, shaped and typed like `q`.

        Raises:
            ValueError: shapes, dtypes or devices are not those of the layer and the cache.
            RunError: a launch was refused.
        """
        self._check(metadata, self.layers[layer], q, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if len(q):
            self._write(metadata, layer, _rows(k), _rows(v))
            self._attend(metadata, layer, _rows(q), out)
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block to block, (source, target), in all layers; all sources are read before a write.

        Raises:
            ValueError: a target is the null block, or blocks are copied in a circle.
        """
        if any(target == NULL_BLOCK for _, target in pairs):
            raise ValueError("the null block is never written")
        pending = list(pairs)
        while pending:
            sources = {source for source, _ in pending}
            # A launch copies in no order, so a block that is still to be read has to wait for the next.
            ready = [pair for pair in pending if pair[1] not in sources]
            if not ready:
                raise ValueError(f"blocks are copied in a circle: {pending}")
            pending = [pair for pair in pending if pair[1] in sources]
            on_device = torch.tensor(ready, dtype=torch.int32, device=self._device)
            arguments = CopyArguments(
                on_device.data_ptr(), self._copied.data_ptr(), self._bytes_of_block.data_ptr()
            )
            self._kernels.launch(_COPY, (len(ready), len(self._copied), 1), _COPY_THREADS, 0, arguments)

    def _write(self, metadata: AttentionMetadata, layer: int, k: Tensor, v: Tensor) -> None:
        num_tokens, num_kv_heads, _ = k.shape
        sides = [
            WriteSide(rows.data_ptr(), cache.elements.data_ptr(), _address(cache.scales), rows.stride(0))
            for rows, cache in ((k, self.key_caches[layer]), (v, self.value_caches[layer]))
        ]
        arguments = WriteArguments(*sides, metadata.slot_mapping.data_ptr(), num_tokens, num_kv_heads)
        grid = (-(-num_tokens * num_kv_heads // _WRITE_WARPS), 2, 1)
        self._kernels.launch(self._layer_kernels[layer].write, grid, _WRITE_WARPS * 32, 0, arguments)

    def _attend(self, metadata: AttentionMetadata, layer: int, q: Tensor, out: Tensor) -> None:
        spec, kernels = self.layers[layer], self._layer_kernels[layer]
        plan = plan_step(
            spec,
            kernels,
            num_tokens=len(q),
            num_seqs=len(metadata.seq_lens),
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            num_multiprocessors=self._kernels.num_multiprocessors,
            deterministic=self._deterministic,
        )
        values, softmax = self._partial_results(q, plan)
        keys_cache, values_cache = self.key_caches[layer], self.value_caches[layer]
        arguments = AttentionArguments(
            out=out.data_ptr(),
            q=q.data_ptr(),
            key_cache=keys_cache.elements.data_ptr(),
            value_cache=values_cache.elements.data_ptr(),
            key_scales=_address(keys_cache.scales),
            value_scales=_address(values_cache.scales),
            block_tables=metadata.block_tables.data_ptr(),
            query_start_loc=metadata.query_start_loc.data_ptr(),
            seq_lens=metadata.seq_lens.data_ptr(),
            partial_out=_address(values),
            partial_softmax=_address(softmax),
            q_stride=q.stride(0),
            num_seqs=len(metadata.seq_lens),
            max_blocks=metadata.block_tables.shape[1],
            block_shift=self._block_size.bit_length() - 1,
            num_kv_heads=spec.num_kv_heads,
            group=spec.num_heads // spec.num_kv_heads,
            num_splits=plan.num_splits,
            split_len=plan.split_len,
            window=spec.sliding_window or 0,
            scale=spec.scale,
            soft_cap=spec.logits_soft_cap or 0.0,
        )
        grid = (plan.num_tiles, spec.num_kv_heads, plan.num_splits)
        kernel = plan.kernel
        self._kernels.launch(kernel.name, grid, kernel.threads, kernel.shared_bytes, arguments)
        if plan.num_splits > 1:
            self._kernels.launch(kernels.merge, (len(q) * spec.num_heads, 1, 1), spec.head_dim, 0, arguments)

    def _partial_results(self, q: Tensor, plan: StepPlan) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Memory for the weighted values and the softmax of each split; None where there is one."""
        if plan.num_splits == 1:
            return None, None
        num_parts = q.shape[0] * q.shape[1] * plan.num_splits
        values = torch.empty(num_parts, q.shape[2], dtype=torch.float32, device=q.device)
        return values, torch.empty(num_parts, 2, dtype=torch.float32, device=q.device)

    def _check(
        self, metadata: AttentionMetadata, spec: AttentionLayer, q: Tensor, k: Tensor, v: Tensor
    ) -> None:
        num_tokens = len(metadata.slot_mapping)
        for name, tensor, heads in (
            ("q", q, spec.num_heads),
            ("k", k, spec.num_kv_heads),
            ("v", v, spec.num_kv_heads),
        ):
            expected = (num_tokens, heads, spec.head_dim)
            if tensor.shape != expected or tensor.dtype != self._dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {self._dtype} {expected}"
                )
        tensors = {
            "query_start_loc": (metadata.query_start_loc, torch.int32),
            "seq_lens": (metadata.seq_lens, torch.int32),
            "block_tables": (metadata.block_tables, torch.int32),
            "slot_mapping": (metadata.slot_mapping, torch.int64),
        }
        for name, (tensor, dtype) in tensors.items():
            if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != self._device.type:
                raise ValueError(f"{name} is not a contiguous {dtype} tensor on {self._device}")

    def _int64(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _rows(tensor: Tensor) -> Tensor:
    """`tensor` [num_tokens, heads, head_dim] with whole rows, which may lie apart as in a fused matrix."""
    whole = tensor.stride()[1:] == (tensor.shape[2], 1)
    row_bytes = tensor.stride(0) * tensor.itemsize
    aligned = tensor.data_ptr() % _ALIGNMENT == 0 and row_bytes % _ALIGNMENT == 0
    return tensor if whole and aligned else tensor.contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
