"""One step of the scheduler as tensors: packed tokens of all its sequences, without padding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.engine.block_pool import NULL_BLOCK
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import Sequence
from tessera_cli.kernels.backend import AttentionMetadata


@dataclass(frozen=True, eq=False)
class Batch:
    """What a decoder runs in one step.

    Attributes:
        input_ids: int64 [num_tokens], in the order of the scheduler's output.
        positions: int64 [num_tokens], counted from the start of each prompt.
        logits_indices: int64 [num_sampling], the packed index of the last token of each of `sampling`.
        metadata: where the tokens' keys and values belong.
        sampling: the sequences that get a token from this step.
    """

    input_ids: Tensor
    positions: Tensor
    logits_indices: Tensor
    metadata: AttentionMetadata
    sampling: tuple[Sequence, ...]


def build_batch(output: SchedulerOutput, *, block_size: int, device: torch.device) -> Batch:
    """Pack the tokens of a step that schedules at least one."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logits_indices: list[int] = []
    query_start_loc = [0]
    seq_lens: list[int] = []
    for item in output.scheduled:
        sequence, end = item.sequence, item.start + item.num_scheduled_tokens
        table = sequence.block_table
        input_ids += sequence.token_ids[item.start : end]
        positions += range(item.start, end)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(item.start, end)]
        query_start_loc.append(len(input_ids))
        seq_lens.append(end)
        if item.samples:
            logits_indices.append(len(input_ids) - 1)

    # Blocks that are reserved for later tokens are of no use to this step.
    num_blocks = -(-max(seq_lens) // block_size)
    tables = [item.sequence.block_table[:num_blocks] for item in output.scheduled]
    padded = [table + [NULL_BLOCK] * (num_blocks - len(table)) for table in tables]

    def tensor(values: list[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    metadata = AttentionMetadata(
        query_start_loc=tensor(query_start_loc, torch.int32),
        seq_lens=tensor(seq_lens, torch.int32),
        block_tables=tensor(padded, torch.int32),
        slot_mapping=tensor(slots, torch.int64),
        max_query_len=max(item.num_scheduled_tokens for item in output.scheduled),
        max_seq_len=max(seq_lens),
    )
    return Batch(
        input_ids=tensor(input_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        logits_indices=tensor(logits_indices, torch.int64),
        metadata=metadata,
        sampling=tuple(item.sequence for item in output.scheduled if item.samples),
    )
