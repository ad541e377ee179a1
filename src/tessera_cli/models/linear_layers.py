"""Layers of a decoder that is served: weights in int8, and products that something else computes.

They take the place of `nn.Linear` and `nn.Embedding`, for inference only.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera_cli.int8_weight import Int8Weight
from tessera_cli.models.decoder import Decoder

# So many elements of an int8 weight are made float32 at once: 4 MB.
_CHUNK_ELEMENTS = 1 << 20


class Product(Protocol):
    """x Wᵀ with a weight W [outputs, inputs] that it holds in a form of its own."""

    def __call__(self, x: Tensor) -> Tensor:
        """`x` [n, inputs] float32, contiguous -> float32 [n, outputs]."""
        ...

    def rows(self, index: Tensor) -> Tensor:
        """The rows `index` (int64 [n]) of W as a look-up gives them: float32 [n, inputs]."""
        ...


# A product with a weight of shape [outputs, inputs], whose memory it may take for its own; None where plain
# torch is as good.
BuildProduct = Callable[["Tensor | Int8Weight"], "Product | None"]


class QuantisedLinear(nn.Module):
    """A linear layer with an int8 weight, in plain torch: the definition of the compiled one.

    Attributes:
        weight: int8 [outputs, inputs].
        weight_scale: float32 [outputs].
        bias: [outputs], or None.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, weight: Int8Weight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight.values)
        self.register_buffer("weight_scale", weight.scales)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        rows = max(1, _CHUNK_ELEMENTS // self.weight.shape[1])
        parts = zip(self.weight.split(rows), self.weight_scale.split(rows), strict=True)
        out = torch.cat([F.linear(x, Int8Weight(*part).dequantise().to(x.dtype)) for part in parts], dim=-1)
        return out if self.bias is None else out.add_(self.bias)


class QuantisedEmbedding(nn.Module):
    """An embedding with int8 rows, each times its scale when it is looked up.

    Attributes:
        weight: int8 [vocab, hidden].
        weight_scale: float32 [vocab].
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, weight: Int8Weight, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", weight.values)
        self.register_buffer("weight_scale", weight.scales)
        self._dtype = dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        return Int8Weight(self.weight[input_ids], self.weight_scale[input_ids]).dequantise().to(self._dtype)


class ProductLinear(nn.Module):
    """A linear layer by a product, which is float32 inside whatever dtype comes in and goes out.

    Attributes:
        product: x Wᵀ.
        bias: [outputs], or None.
    """

    def __init__(self, product: Product, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.product = product
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x.float().contiguous()).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)


class ProductEmbedding(nn.Module):
    """The embedding of a tied model: rows of the weight that the head's product holds."""

    def __init__(self, product: Product, dtype: torch.dtype) -> None:
        super().__init__()
        self._product = product
        self._dtype = dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        return self._product.rows(input_ids).to(self._dtype)


def use_int8_layers(decoder: Decoder) -> None:
    """Give `decoder`, on the meta device, int8 weights in place of its matrices; biases stay."""
    for layer in decoder.layers:
        for name, module in list(layer.named_children()):
            if isinstance(module, nn.Linear):
                _put(layer, name, QuantisedLinear(_empty_like(module.weight), module.bias))
    embedding = QuantisedEmbedding(_empty_like(decoder.embed_tokens.weight), decoder.dtype)
    _put(decoder, "embed_tokens", embedding)
    if decoder.lm_head is not None:
        _put(decoder, "lm_head", QuantisedLinear(_empty_like(decoder.lm_head.weight), None))


def tie_int8_head(decoder: Decoder) -> None:
    """Let the head of a tied int8 `decoder` be the embedding's weight, once it is where it stays."""
    weight = _weight(decoder.embed_tokens)
    if decoder.config.tie_word_embeddings and isinstance(weight, Int8Weight):
        _put(decoder, "lm_head", QuantisedLinear(weight, None))


def replace_products(decoder: Decoder, build: BuildProduct) -> None:
    """Let `build` make the products of `decoder`; a weight that one is made of is let go at once.

    A tied embedding then reads its rows from the head's product, so that the matrix is held once.
    """
    for layer in decoder.layers:
        for name, module in list(layer.named_children()):
            if isinstance(module, nn.Linear | QuantisedLinear):
                product = build(_weight(module))
                if product is not None:
                    _put(layer, name, ProductLinear(product, module.bias))
    head = decoder.embed_tokens if decoder.lm_head is None else decoder.lm_head
    product = build(_weight(head))
    if product is not None:
        _put(decoder, "lm_head", ProductLinear(product, None))
        if decoder.config.tie_word_embeddings:
            _put(decoder, "embed_tokens", ProductEmbedding(product, decoder.dtype))


def _put(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Set an attribute whose type, when training, is another one."""
    nn.Module.__setattr__(module, name, layer)


def _weight(module: nn.Linear | nn.Embedding | QuantisedLinear | QuantisedEmbedding) -> Tensor | Int8Weight:
    if isinstance(module, QuantisedLinear | QuantisedEmbedding):
        return Int8Weight(module.weight, module.weight_scale)
    return module.weight.detach()


def _empty_like(weight: Tensor) -> Int8Weight:
    # `empty_like` of a meta tensor has torch load its symbolic shapes.
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    return Int8Weight(values, torch.empty(len(weight), dtype=torch.float32, device=weight.device))
