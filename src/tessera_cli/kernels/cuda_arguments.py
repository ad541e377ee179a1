"""What the CUDA kernels are given: the structures of their source, field by field."""

import ctypes

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_longlong


class AttentionArguments(ctypes.Structure):
    """`AttentionArguments` of attention_tile.cuh, where the fields are explained."""

    _fields_ = (
        *(
            (name, _POINTER)
            for name in (
                "out",
                "q",
                "key_cache",
                "value_cache",
                "key_scales",
                "value_scales",
                "block_tables",
                "query_start_loc",
                "seq_lens",
                "partial_out",
                "partial_softmax",
            )
        ),
        ("q_stride", _LONG),
        *(
            (name, _INT)
            for name in (
                "num_seqs",
                "max_blocks",
                "block_shift",
                "num_kv_heads",
                "group",
                "num_splits",
                "split_len",
                "window",
            )
        ),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
    )


class WriteSide(ctypes.Structure):
    """`WriteSide` of kv_cache.cuh: keys or values."""

    _fields_ = (("source", _POINTER), ("cache", _POINTER), ("scales", _POINTER), ("stride", _LONG))


class WriteArguments(ctypes.Structure):
    """`WriteArguments` of kv_cache.cuh."""

    _fields_ = (
        ("keys", WriteSide),
        ("values", WriteSide),
        ("slot_mapping", _POINTER),
        ("num_tokens", _INT),
        ("num_kv_heads", _INT),
    )


class CopyArguments(ctypes.Structure):
    """`CopyArguments` of kv_cache.cuh."""

    _fields_ = (("pairs", _POINTER), ("caches", _POINTER), ("bytes_of_block", _POINTER))


Arguments = AttentionArguments | WriteArguments | CopyArguments
