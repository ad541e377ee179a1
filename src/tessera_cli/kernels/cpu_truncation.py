"""Top-k and top-p by the compiled library; `engine.truncation` has the plain version."""

import torch
from torch import Tensor

from tessera_cli.kernels.cpu_library import CpuLibrary


def truncate_rows(library: CpuLibrary, weights: Tensor, rows: Tensor, top_k: Tensor, top_p: Tensor) -> None:
    """Set to zero, in place, the weights of `rows` that top-k, then top-p drop.

    A row's result is the same bit for bit whatever else is in the batch, on any number of threads. Sums are
    float64.

    Args:
        library: the loaded one.
        weights: contiguous float32 [any, vocab], not negative. A NaN row gets a result that means nothing.
        rows: int64 [n], each at most once.
        top_k: int64 [n], from 1 to vocab, which keeps all.
        top_p: float64 [n], a share of what top-k leaves; 1 keeps all.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    counted = (rows, torch.int64), (top_k, torch.int64), (top_p, torch.float64)
    per_row = all(t.dtype == dtype and t.shape == rows.shape and t.is_contiguous() for t, dtype in counted)
    if not per_row or weights.dtype != torch.float32 or weights.ndim != 2 or not weights.is_contiguous():
        raise ValueError(
            "weights must be contiguous float32 [any, vocab], the others int64, int64, float64 [n]"
        )
    library.functions.tessera_truncate(
        weights.data_ptr(),
        weights.shape[1],
        rows.data_ptr(),
        len(rows),
        top_k.data_ptr(),
        top_p.data_ptr(),
        torch.get_num_threads(),
    )
