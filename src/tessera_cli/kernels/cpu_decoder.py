"""The layers of a decoder in one compiled call, from the embedded tokens to the normed hidden states."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera_cli.kernels.backend import AttentionMetadata
from tessera_cli.kernels.cpu import CpuAttention
from tessera_cli.kernels.cpu_library import CpuLibrary, DecoderLayer, Layer, Linear
from tessera_cli.kernels.cpu_operators import WIDTH_MULTIPLE
from tessera_cli.kernels.float32_linear import Float32Linear
from tessera_cli.kernels.int8_linear import Int8Linear


@dataclass(frozen=True, eq=False)
class Projection:
    """A product with packed weights, and its bias [outputs], float32, or None."""

    product: Float32Linear | Int8Linear
    bias: Tensor | None

    def described(self) -> Linear:
        """What the library is told of it; product and bias must outlive that."""
        return self.product.described(self.bias)


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One layer: its RMS norms [hidden], float32, before attention and before the MLP, and its products.

    Attributes:
        projections: those of qkv, o, gate and up, down.
        rotates: whether queries and keys are.
    """

    input_norm: Tensor
    post_norm: Tensor
    projections: tuple[Projection, ...]
    rotates: bool


class CpuDecoder:
    """Layers of attention and gated MLP, each after its norm, over the paged cache of `attention`.

    Equal, bit for bit, to the same steps called one by one. Widths are those that `CpuOperators` takes.

    Args:
        library: the compiled library.
        attention: holds the cache of as many layers.
        layers: float32 weights, contiguous; they are held, not copied.
        norm: the final norm's weight [hidden].
        eps: of all norms.

    Raises:
        ValueError: sizes do not fit each other, or a width is none of the library's.
    """

    def __init__(
        self,
        library: CpuLibrary,
        attention: CpuAttention,
        layers: Sequence[LayerWeights],
        *,
        norm: Tensor,
        eps: float,
    ) -> None:
        self._functions = library.functions
        self._attention = attention
        self._held = (tuple(layers), norm)
        self._hidden = len(norm)
        self._head_dim = attention.described[0].head_dim
        _check_sizes(layers, attention.described, self._hidden)
        self._norm, self._eps = norm.data_ptr(), eps
        self._layers = (DecoderLayer * len(layers))(*map(_described, layers))

    def __call__(self, metadata: AttentionMetadata, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Normed hidden states [num_tokens, hidden].

        Args:
            metadata: the step's.
            x: the embedded tokens [num_tokens, hidden], float32, contiguous; it is overwritten.
            table: float32 cosines and sines [num_tokens, 1, head_dim], the sine with the sign of the first
                half.

        Raises:
            ValueError: shapes, dtypes or strides do not fit.
        """
        cos, sin = table
        step, num_tokens = self._attention.planned(metadata)
        if x.dtype != torch.float32 or x.shape != (num_tokens, self._hidden) or not x.is_contiguous():
            raise ValueError(
                f"expected contiguous float32 {(num_tokens, self._hidden)}, got {x.dtype} {x.shape}"
            )
        for part in table:
            shape = (num_tokens, 1, self._head_dim)
            if part.dtype != torch.float32 or part.shape != shape or not part.is_contiguous():
                raise ValueError(f"expected contiguous float32 {shape}, got {part.dtype} {part.shape}")
        out = torch.empty_like(x)
        self._functions.tessera_decoder_layers(
            self._layers,
            self._attention.described,
            len(self._layers),
            step,
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            self._norm,
            self._eps,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out


def _check_sizes(layers: Sequence[LayerWeights], caches: Iterable[Layer], hidden: int) -> None:
    """Refuse what the library would read or write beyond its end.

    Raises:
        ValueError: sizes do not fit each other, or a width is none of the library's.
    """
    inner = layers[0].projections[-1].product.inputs
    if hidden % WIDTH_MULTIPLE or inner % WIDTH_MULTIPLE:
        raise ValueError(f"widths {hidden} and {inner} have to be multiples of {WIDTH_MULTIPLE}")
    for layer, cache in zip(layers, caches, strict=True):
        queries, keys = cache.num_heads * cache.head_dim, cache.num_kv_heads * cache.head_dim
        wanted = [(queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner)]
        sizes = [(linear.product.outputs, linear.product.inputs) for linear in layer.projections]
        norms = [len(layer.input_norm), len(layer.post_norm)]
        if sizes != wanted or norms != [hidden, hidden]:
            raise ValueError(f"products of {sizes} and norms of {norms} where {wanted} and {hidden} fit")


def _described(layer: LayerWeights) -> DecoderLayer:
    return DecoderLayer(
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        *(projection.described() for projection in layer.projections),
        layer.rotates,
    )
