"""A scheduled step as packed tensors."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera_cli.engine.batch import Batch, build_batch
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler_output import ScheduledSequence, SchedulerOutput
from tessera_cli.engine.sequence import Sequence


def scheduled(start: int, count: int, num_tokens: int, blocks: list[int]) -> ScheduledSequence:
    """A sequence whose token at each position tells its first block and the position."""
    sequence = Sequence("r", [100 * blocks[0] + position for position in range(num_tokens)], SamplingParams())
    sequence.block_table += blocks
    return ScheduledSequence(sequence, count, start, int(start + count == num_tokens))


def build(items: list[ScheduledSequence], *, block_size: int = 4) -> Batch:
    total = sum(item.num_scheduled_tokens for item in items)
    return build_batch(SchedulerOutput(tuple(items), (), (), total), block_size=block_size)


def test_packs_a_mixed_step_of_decode_last_chunk_and_first_chunk() -> None:
    batch = build([scheduled(3, 1, 4, [1]), scheduled(5, 2, 7, [2, 3]), scheduled(0, 5, 9, [4, 5, 6])])
    assert batch.input_ids.tolist() == [103, 205, 206, 400, 401, 402, 403, 404]
    assert batch.positions.tolist() == [3, 5, 6, 0, 1, 2, 3, 4]
    assert batch.metadata.query_start_loc.tolist() == [0, 1, 3, 8]
    assert batch.metadata.seq_lens.tolist() == [4, 7, 5]
    assert batch.first_rows == (0, 1, 3)
    assert (batch.metadata.max_query_len, batch.metadata.max_seq_len) == (5, 7)


def test_slots_follow_the_block_tables_and_padding_is_the_null_block() -> None:
    batch = build([scheduled(0, 2, 2, [7]), scheduled(0, 9, 9, [5, 1, 9])])
    assert batch.metadata.block_tables.tolist() == [[7, 0, 0], [5, 1, 9]]
    slots = [28, 29, 20, 21, 22, 23, 4, 5, 6, 7, 36]
    assert batch.metadata.slot_mapping.tolist() == slots


def test_blocks_reserved_for_later_chunks_are_left_out() -> None:
    batch = build([scheduled(0, 5, 20, [3, 1, 2, 5, 4])])
    assert batch.metadata.block_tables.tolist() == [[3, 1]]


def test_all_of_a_batch_moves_to_another_device() -> None:
    batch = build([scheduled(3, 1, 4, [1]), scheduled(5, 2, 7, [2, 3])])
    moved = batch.to(torch.device("meta"))
    for part, other in ((batch, moved), (batch.metadata, moved.metadata)):
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor):
                there = getattr(other, name)
                assert (there.device.type, there.shape, there.dtype) == ("meta", value.shape, value.dtype)
            elif name != "metadata":
                assert getattr(other, name) == value
    assert batch.to(torch.device("cpu")) is batch


def test_dtypes_are_those_of_the_kernels_contract() -> None:
    batch = build([scheduled(0, 3, 3, [1])])
    metadata = batch.metadata
    assert {batch.input_ids.dtype, batch.positions.dtype, metadata.slot_mapping.dtype} == {torch.int64}
    assert {t.dtype for t in (metadata.query_start_loc, metadata.seq_lens, metadata.block_tables)} == {
        torch.int32
    }


SHARES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=6)


@given(shares=SHARES, block_size=st.sampled_from([1, 3, 16]))
@settings(deadline=None)
def test_every_token_has_the_id_position_and_slot_of_the_plain_definition(
    shares: list[tuple[int, int, int]], block_size: int
) -> None:
    items, next_block = [], 1
    for start, count, later in shares:
        num_blocks = -(-(start + count + later) // block_size)
        blocks = list(range(next_block + num_blocks - 1, next_block - 1, -1))
        items.append(scheduled(start, count, start + count + later, blocks))
        next_block += num_blocks
    batch = build(items, block_size=block_size)
    packed = [(item, p) for item in items for p in range(item.start, item.start + item.num_scheduled_tokens)]
    assert batch.positions.tolist() == [p for _, p in packed]
    assert batch.input_ids.tolist() == [item.sequence.token_ids[p] for item, p in packed]
    assert batch.metadata.slot_mapping.tolist() == [
        item.sequence.block_table[p // block_size] * block_size + p % block_size for item, p in packed
    ]
