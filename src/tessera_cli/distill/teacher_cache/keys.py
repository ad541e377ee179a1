"""By what a document is found in a cache: its content, never its place in a file or a batch."""

import hashlib
from itertools import pairwise

import numpy as np

from tessera_cli.distill.data.corpus import Document, TrainBatch

KEY_BYTES = 16


def document_key(document: Document) -> bytes:
    """The key of a document: a hash of its ids and of the places whose next token is a target."""
    return _key(document.token_ids, np.flatnonzero(document.supervised) - 1)


def batch_keys(batch: TrainBatch) -> list[bytes]:
    """The keys of a batch's documents, in the batch's order."""
    ids, targets = batch.input_ids.numpy(), batch.target_index.numpy()
    return [_key(ids[start:end], targets[first:last] - start) for start, end, first, last in _spans(batch)]


def batch_documents(batch: TrainBatch) -> tuple[Document, ...]:
    """The documents that a batch was built of."""
    ids, targets = batch.input_ids.numpy().astype(np.int32), batch.target_index.numpy()
    supervised = np.zeros(len(ids), dtype=bool)
    supervised[targets + 1] = True
    return tuple(Document(ids[start:end], supervised[start:end]) for start, end, _, _ in _spans(batch))


def batch_target_counts(batch: TrainBatch) -> list[int]:
    """How many targets each document of a batch has."""
    return [last - first for _, _, first, last in _spans(batch)]


def _spans(batch: TrainBatch) -> list[tuple[int, int, int, int]]:
    """Of each document: its tokens `start:end` and its targets `first:last` in the batch."""
    bounds = np.searchsorted(batch.target_index.numpy(), batch.cu_seqlens).tolist()
    spans = zip(pairwise(batch.cu_seqlens), pairwise(bounds), strict=True)
    return [(*tokens, *targets) for tokens, targets in spans]


def _key(token_ids: np.ndarray, target_index: np.ndarray) -> bytes:
    digest = hashlib.sha256(len(token_ids).to_bytes(8, "little"))
    digest.update(token_ids.astype("<i4").tobytes())
    digest.update(target_index.astype("<i4").tobytes())
    return digest.digest()[:KEY_BYTES]
