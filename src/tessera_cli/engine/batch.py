"""One step of the scheduler as tensors: packed tokens of all its sequences, without padding."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tessera_cli.engine.block_pool import NULL_BLOCK
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.kernels.backend import AttentionMetadata


@dataclass(frozen=True, eq=False)
class Batch:
    """What a model runs in one step.

    Attributes:
        input_ids: int64 [num_tokens], in the order of the scheduler's output.
        positions: int64 [num_tokens], counted from the start of each prompt.
        first_rows: of each scheduled sequence, the packed index of its first token.
        metadata: where the tokens' keys and values belong.
    """

    input_ids: Tensor
    positions: Tensor
    first_rows: tuple[int, ...]
    metadata: AttentionMetadata

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; copies to a CUDA device are queued, and nobody waits for them."""
        if device.type == "cpu":
            return self

        def sent(tensor: Tensor) -> Tensor:
            return staged(tensor, device).to(device, non_blocking=True)

        metadata = self.metadata
        return replace(
            self,
            input_ids=sent(self.input_ids),
            positions=sent(self.positions),
            metadata=replace(
                metadata,
                query_start_loc=sent(metadata.query_start_loc),
                seq_lens=sent(metadata.seq_lens),
                block_tables=sent(metadata.block_tables),
                slot_mapping=sent(metadata.slot_mapping),
            ),
        )


def staged(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` of the CPU where a copy to `device` need not wait for it: for CUDA, in pinned memory.

    torch keeps that memory from other use until the copies from it are done.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor


def build_batch(output: SchedulerOutput, *, block_size: int) -> Batch:
    """Pack the tokens of a step that schedules at least one, on the CPU.

    The loops are over sequences; tokens are counted out by numpy, which for a few numbers is quicker than
    torch and shares its memory.
    """
    counts = np.array([item.num_scheduled_tokens for item in output.scheduled])
    starts = np.array([item.start for item in output.scheduled])
    seq_lens = starts + counts
    query_start_loc = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start_loc[1:])

    input_ids: list[int] = []
    for item in output.scheduled:
        input_ids += item.sequence.token_ids[item.start : item.start + item.num_scheduled_tokens]
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(input_ids)) + (starts - query_start_loc[:-1])[rows]

    # Blocks that are reserved for later tokens are of no use to this step.
    num_blocks = -(-int(seq_lens.max()) // block_size)
    block_tables = np.full((len(counts), num_blocks), NULL_BLOCK, dtype=np.int64)
    for row, item in enumerate(output.scheduled):
        table = item.sequence.block_table[:num_blocks]
        block_tables[row, : len(table)] = table
    slots = block_tables[rows, positions // block_size] * block_size + positions % block_size

    def int32(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values.astype(np.int32))

    metadata = AttentionMetadata(
        query_start_loc=int32(query_start_loc),
        seq_lens=int32(seq_lens),
        block_tables=int32(block_tables),
        slot_mapping=torch.from_numpy(slots),
        max_query_len=int(counts.max()),
        max_seq_len=int(seq_lens.max()),
    )
    return Batch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        positions=torch.from_numpy(positions),
        first_rows=tuple(query_start_loc[:-1].tolist()),
        metadata=metadata,
    )
