"""A scheduled step as packed tensors."""

import torch

from tessera_cli.engine.batch import Batch, build_batch
from tessera_cli.engine.scheduler import Scheduler
from tests.factories import make_scheduler, make_sequences


def step(scheduler: Scheduler, *, token: int = 7) -> Batch:
    """Run one step that samples `token` everywhere; the batch as it was before the commit."""
    output = scheduler.schedule()
    batch = build_batch(output, block_size=scheduler.config.block_size, device=torch.device("cpu"))
    scheduler.commit(output, {item.sequence.request_id: token for item in output.scheduled if item.samples})
    return batch


def test_packs_a_mixed_step_of_decode_last_chunk_and_first_chunk() -> None:
    scheduler = make_scheduler(num_blocks=30, block_size=4, max_num_batched_tokens=8)
    sequences = make_sequences([3, 7, 9])
    for sequence in sequences:
        scheduler.add(sequence)
    step(scheduler)  # all 3 of the first, 5 of the second
    batch = step(scheduler)  # 1, 2 and 5
    first, second, third = sequences
    expected = [*first.token_ids[3:4], *second.token_ids[5:7], *third.token_ids[:5]]
    assert batch.input_ids.tolist() == expected
    assert batch.positions.tolist() == [3, 5, 6, 0, 1, 2, 3, 4]
    assert batch.metadata.query_start_loc.tolist() == [0, 1, 3, 8]
    assert batch.metadata.seq_lens.tolist() == [4, 7, 5]
    assert batch.logits_indices.tolist() == [0, 2]
    assert batch.sampling == (first, second)
    assert (batch.metadata.max_query_len, batch.metadata.max_seq_len) == (5, 7)


def test_slots_follow_the_block_tables_and_padding_is_the_null_block() -> None:
    scheduler = make_scheduler(num_blocks=30, block_size=4, max_num_batched_tokens=16)
    sequences = make_sequences([2, 9])
    for sequence in sequences:
        scheduler.add(sequence)
    batch = step(scheduler)
    short, long = sequences
    assert batch.metadata.block_tables.tolist() == [[*short.block_table, 0, 0], long.block_table]
    slots = batch.metadata.slot_mapping.tolist()
    assert slots[:2] == [short.block_table[0] * 4, short.block_table[0] * 4 + 1]
    assert slots[2:] == [long.block_table[p // 4] * 4 + p % 4 for p in range(9)]
    assert len(set(slots)) == len(slots)


def test_blocks_reserved_for_later_chunks_are_left_out() -> None:
    scheduler = make_scheduler(num_blocks=30, block_size=4, max_num_batched_tokens=5)
    (sequence,) = make_sequences([20])
    scheduler.add(sequence)
    batch = step(scheduler)
    assert len(sequence.block_table) == 5
    assert batch.metadata.block_tables.tolist() == [sequence.block_table[:2]]
    assert batch.sampling == ()
    assert batch.logits_indices.numel() == 0


def test_dtypes_are_those_of_the_kernels_contract() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequences([3])[0])
    batch = step(scheduler)
    assert {batch.input_ids.dtype, batch.positions.dtype, batch.logits_indices.dtype} == {torch.int64}
    metadata = batch.metadata
    assert metadata.slot_mapping.dtype == torch.int64
    assert {t.dtype for t in (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables)} == {
        torch.int32
    }
