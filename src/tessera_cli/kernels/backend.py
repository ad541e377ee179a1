"""What every paged-attention backend is given, and which backend runs where."""

from dataclasses import dataclass

from torch import Tensor

from tessera_cli.errors import UsageError

NULL_BLOCK = 0
SKIPPED_SLOT = -1


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where the tokens of one step belong; one object serves all the layers of that step.

    Attributes:
        query_start_loc: int32 [num_seqs + 1], the first packed token of each sequence, and their number.
        seq_lens: int32 [num_seqs], tokens in the cache after this step.
        block_tables: int32 [num_seqs, max_blocks], padded with the null block 0.
        slot_mapping: int64 [num_tokens], block * block_size + offset; -1 is skipped.
        max_query_len: the longest query of the step, in tokens.
        max_seq_len: the longest sequence of the step, in tokens.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_seq_len: int


def select_backend(name: str, device: str) -> tuple[str, str]:
    """The attention backend for `name` ("auto" or a backend's name) on `device`, and the reason for it.

    Raises:
        UsageError: no backend has this name.
    """
    if name == "auto":
        return "reference", f"plain PyTorch, the only backend for {device}"
    if name == "reference":
        return "reference", "asked for"
    raise UsageError(f"{name!r} is not an attention backend", hint="use auto or reference")
