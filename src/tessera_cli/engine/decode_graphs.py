"""Decode steps as captured graphs: all kernels of a step in one launch, over inputs that stay where they are.

Launched one by one, the kernels of a small step take the host longer than the device. A graph has its number
of rows, so there is one for each of a few sizes, and a step takes the least that holds it. The rows left over
are sequences without tokens: they see nothing, and their slot is none, so they write nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera_cli.engine.batch import Batch, staged
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.forward import Forward
from tessera_cli.kernels.backend import NULL_BLOCK, SKIPPED_SLOT, AttentionMetadata

_SIZE_MULTIPLE = 8


class Capture(Protocol):
    """Records what `function` does on the device; the result does that again and gives the same tensor.

    `function` is called with inputs that may be overwritten before each replay, and reads none on the host.
    """

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]: ...


class CudaCapture:
    """Captures CUDA graphs of one memory pool: no two may run at once, and a result lives until the next.

    As in the notes on CUDA graphs in PyTorch's documentation. All captures use one stream, so that they share
    the pool's memory and the workspace of cuBLAS.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Capture`; `function` is called twice, once to warm up what is set up at a first call."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                function()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                output = function()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


class DecodeGraphs:
    """Steps of one token a sequence through captured graphs.

    Args:
        forward: takes batches on `device` whose metadata are bounds: `max_seq_len` is the engine's longest.
            Whatever tensors it reads beside them must stay the same, though their content may change.
        capture: called for each size at once.
        config: the engine's; its sizes are the graphs'.
        device: of the inputs.
    """

    def __init__(
        self, forward: Forward, capture: Capture, config: EngineConfig, device: torch.device
    ) -> None:
        self.sizes = graph_sizes(config.max_num_slots)
        self._device = device
        self._max_seq_len = config.max_model_len
        nobody = _nobody(config.blocks_for(config.max_model_len))
        self._inputs = pad_decodes(nobody, self.sizes[-1]).to(device)
        # Largest first: the memory that it takes of the pool is enough for all the others.
        self._replays = {size: capture(partial(self._run, forward, size)) for size in reversed(self.sizes)}

    @staticmethod
    def takes(batch: Batch) -> bool:
        """Whether `batch` is one token of each sequence."""
        return batch.metadata.max_query_len == 1

    def __call__(self, batch: Batch) -> Tensor:
        """Final hidden states [num_tokens, hidden] of a `batch` on the CPU; the next call overwrites them."""
        num_tokens = len(batch.input_ids)
        size = next(size for size in self.sizes if size >= num_tokens)
        self._write(pad_decodes(batch, size))
        return self._replays[size]()[:num_tokens]

    def _write(self, batch: Batch) -> None:
        """Put a padded `batch` in the place of the inputs' first rows."""

        def write(target: Tensor, source: Tensor) -> None:
            target[: len(source)].copy_(staged(source, self._device), non_blocking=True)

        inputs, old, new = self._inputs, self._inputs.metadata, batch.metadata
        write(inputs.input_ids, batch.input_ids)
        write(inputs.positions, batch.positions)
        write(old.query_start_loc, new.query_start_loc)
        write(old.seq_lens, new.seq_lens)
        write(old.slot_mapping, new.slot_mapping)
        # Tables are as wide as the longest sequence can be, and what there is to send seldom is.
        old.block_tables[: len(new.block_tables)].fill_(NULL_BLOCK)
        write(old.block_tables[:, : new.block_tables.shape[1]], new.block_tables)

    def _run(self, forward: Forward, size: int) -> Tensor:
        """`forward` over the first `size` rows of the inputs, in views that no other step has."""
        inputs, metadata = self._inputs, self._inputs.metadata
        batch = Batch(
            input_ids=inputs.input_ids[:size],
            positions=inputs.positions[:size],
            first_rows=tuple(range(size)),
            metadata=AttentionMetadata(
                query_start_loc=metadata.query_start_loc[: size + 1],
                seq_lens=metadata.seq_lens[:size],
                block_tables=metadata.block_tables[:size],
                slot_mapping=metadata.slot_mapping[:size],
                max_query_len=1,
                max_seq_len=self._max_seq_len,
            ),
        )
        return forward(batch)


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of the graphs: 1, 2, 4, then multiples of 8 until one holds `max_num_seqs`."""
    small = [size for size in (1, 2, 4) if size < 2 * max_num_seqs]
    largest = -(-max_num_seqs // _SIZE_MULTIPLE) * _SIZE_MULTIPLE
    return (*small, *(range(_SIZE_MULTIPLE, largest + 1, _SIZE_MULTIPLE) if max_num_seqs > 4 else ()))


def pad_decodes(batch: Batch, size: int) -> Batch:
    """`batch`, one token of each sequence, with sequences without tokens up to `size`.

    Theirs are the slot -1, the null block, and a row each that means nothing.
    """
    metadata = batch.metadata
    missing = size - len(batch.input_ids)

    def padded(tensor: Tensor, value: int) -> Tensor:
        return F.pad(tensor, (0, missing), value=value)

    return Batch(
        input_ids=padded(batch.input_ids, 0),
        positions=padded(batch.positions, 0),
        first_rows=batch.first_rows,
        metadata=AttentionMetadata(
            query_start_loc=padded(metadata.query_start_loc, len(batch.input_ids)),
            seq_lens=padded(metadata.seq_lens, 0),
            block_tables=F.pad(metadata.block_tables, (0, 0, 0, missing), value=NULL_BLOCK),
            slot_mapping=padded(metadata.slot_mapping, SKIPPED_SLOT),
            max_query_len=1,
            max_seq_len=metadata.max_seq_len,
        ),
    )


def _nobody(num_blocks: int) -> Batch:
    """A batch of no sequence, whose table has `num_blocks` columns."""
    int64, int32 = (torch.zeros(0, dtype=dtype) for dtype in (torch.int64, torch.int32))
    return Batch(
        input_ids=int64,
        positions=int64,
        first_rows=(),
        metadata=AttentionMetadata(
            query_start_loc=torch.zeros(1, dtype=torch.int32),
            seq_lens=int32,
            block_tables=torch.zeros(0, num_blocks, dtype=torch.int32),
            slot_mapping=int64,
            max_query_len=1,
            max_seq_len=0,
        ),
    )
