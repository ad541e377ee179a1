"""Attention for training: documents packed into one sequence, causal in each and isolated from the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.kernels.dense import dense_attention, visible


@dataclass(frozen=True)
class _Group:
    """Documents of similar length: `count` rows of `width` slots each."""

    count: int
    width: int


class PackedAttention:
    """Causal attention over packed documents; its `attend` is what `Decoder.forward` takes.

    Documents are right-padded to the longest of their group and attended a group at a time. Under a causal
    mask a token sees only what precedes it, so padding on the right needs no mask. Groups go by quarters of
    powers of two: no document is padded by more than a quarter, and there are few groups whatever the mix of
    lengths.

    Args:
        cu_seqlens: cumulative lengths of the documents, from 0 to the number of packed tokens.
        layers: what attention is in each layer; `Decoder.attention_layers`.
        device: where the queries, keys and values will be.

    Attributes:
        num_slots: tokens and padding that a layer attends over.

    Raises:
        ValueError: `cu_seqlens` does not start at 0 or does not increase.
    """

    def __init__(
        self,
        cu_seqlens: Sequence[int],
        layers: Sequence[AttentionLayer],
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_cu_seqlens(cu_seqlens)
        self._layers = tuple(layers)
        lengths = [end - start for start, end in pairwise(cu_seqlens)]
        by_width: dict[int, list[int]] = {}
        for document, length in enumerate(lengths):
            by_width.setdefault(_rounded_up(length), []).append(document)

        first_slot = [0] * len(lengths)
        self._groups: list[_Group] = []
        self.num_slots = 0
        for documents in by_width.values():
            width = max(lengths[document] for document in documents)
            for row, document in enumerate(documents):
                first_slot[document] = self.num_slots + row * width
            self._groups.append(_Group(len(documents), width))
            self.num_slots += len(documents) * width

        shift = torch.tensor([slot - start for slot, start in zip(first_slot, cu_seqlens, strict=False)])
        packed = torch.arange(cu_seqlens[-1])
        self._slots = (packed + shift.repeat_interleave(torch.tensor(lengths))).to(device)

    @torch.compiler.disable
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend within each document; never compiled, for its shapes change with every batch.

        Args:
            layer: index of the layer, from 0.
            q: [num_tokens, num_heads, head_dim].
            k: [num_tokens, num_kv_heads, head_dim].
            v: like `k`.

        Returns:
            Like `q`.
        """
        padded = [self._pad(tensor) for tensor in (q, k, v)]
        outputs: list[Tensor] = []
        start = 0
        for group in self._groups:
            end = start + group.count * group.width
            rows = [tensor[start:end].unflatten(0, (group.count, group.width)) for tensor in padded]
            outputs.append(_causal(self._layers[layer], *rows).flatten(0, 1))
            start = end
        return torch.cat(outputs).index_select(0, self._slots)

    def _pad(self, tensor: Tensor) -> Tensor:
        # Zeros, not repeated tokens: a NaN of one document can not reach another one through its padding.
        slots = tensor.new_zeros(self.num_slots, *tensor.shape[1:])
        return slots.index_copy(0, self._slots, tensor)


def attend_per_document(
    cu_seqlens: Sequence[int], layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """What `PackedAttention` computes, one document after the other: the plain version it is tested against.

    Shapes are those of `PackedAttention.attend`.
    """
    _check_cu_seqlens(cu_seqlens)
    spans = [slice(start, end) for start, end in pairwise(cu_seqlens)]
    return torch.cat([_causal(layer, q[None, span], k[None, span], v[None, span])[0] for span in spans])


def _rounded_up(length: int) -> int:
    """The first of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, ... that is no less than `length`."""
    step = 1 << max(0, (length - 1).bit_length() - 3)
    return -(-length // step) * step


def _check_cu_seqlens(cu_seqlens: Sequence[int]) -> None:
    """Refuse bounds that do not describe one or more documents of at least one token.

    Raises:
        ValueError: they do not start at 0 or do not increase.
    """
    if len(cu_seqlens) < 2 or cu_seqlens[0] != 0 or any(end <= start for start, end in pairwise(cu_seqlens)):
        raise ValueError(f"cu_seqlens must start at 0 and increase, got {list(cu_seqlens)}")


def _causal(layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, length, heads, head_dim], fewer heads in `k` and `v` for grouped queries -> like `q`."""
    length, mask = q.shape[1], None
    if layer.sliding_window is not None and layer.sliding_window < length:
        positions = torch.arange(length, device=q.device)
        mask = visible(layer, positions, positions)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return dense_attention(layer, q, k, v, mask).transpose(1, 2)
