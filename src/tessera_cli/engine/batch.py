"""One step of the scheduler as tensors: packed tokens of all its sequences, without padding."""

from dataclasses import dataclass

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


def build_batch(output: SchedulerOutput, *, block_size: int, device: torch.device) -> Batch:
    """Pack the tokens of a step that schedules at least one.

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

    def tensor(values: NDArray[np.int64], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(values).to(device=device, dtype=dtype)

    metadata = AttentionMetadata(
        query_start_loc=tensor(query_start_loc, torch.int32),
        seq_lens=tensor(seq_lens, torch.int32),
        block_tables=tensor(block_tables, torch.int32),
        slot_mapping=tensor(slots, torch.int64),
        max_query_len=int(counts.max()),
        max_seq_len=int(seq_lens.max()),
    )
    return Batch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64, device=device),
        positions=tensor(positions, torch.int64),
        first_rows=tuple(query_start_loc[:-1].tolist()),
        metadata=metadata,
    )
