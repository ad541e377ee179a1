"""How a step's tokens go through a model: in one compiled call where there is one, else layer by layer."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tessera_cli.engine.batch import Batch
from tessera_cli.kernels.backend import AttentionBackend, build_operators
from tessera_cli.kernels.cpu import CpuAttention
from tessera_cli.kernels.cpu_decoder import CpuDecoder, LayerWeights, Projection
from tessera_cli.kernels.cpu_library import CpuLibrary, load_library
from tessera_cli.kernels.float32_linear import Float32Linear
from tessera_cli.kernels.int8_linear import Int8Linear
from tessera_cli.models.causal_lm import CausalLM
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.layers import DecoderLayer
from tessera_cli.models.linear_layers import ProductLinear

Forward = Callable[[Batch], Tensor]
"""A batch to final hidden states [num_tokens, hidden], its keys and values stored on the way."""


def build_forward(model: CausalLM, attention: AttentionBackend, backend: str) -> Forward:
    """The quickest way through `model` for batches whose keys and values `attention` holds."""
    if not isinstance(model, Decoder):
        return partial(_layer_by_layer, model, attention)
    sizes = model.config
    operators = build_operators(backend, (sizes.hidden_size, sizes.intermediate_size, sizes.head_dim))
    # The compiled call takes the operators' steps, and has widths where they have them.
    compiled = None if operators is None else _compiled_layers(model, attention)
    if compiled is not None:
        return partial(_at_once, model, compiled)
    return partial(_layer_by_layer, partial(model, operators=operators), attention)


def _layer_by_layer(model: Callable[..., Tensor], attention: AttentionBackend, batch: Batch) -> Tensor:
    return model(batch.input_ids, batch.positions, partial(attention.attend, batch.metadata))


def _at_once(decoder: Decoder, layers: CpuDecoder, batch: Batch) -> Tensor:
    x, table = decoder.enter(batch.input_ids, batch.positions)
    return decoder.leave(layers(batch.metadata, x, table))


def _compiled_layers(decoder: Decoder, attention: AttentionBackend) -> CpuDecoder | None:
    """The compiled layers of `decoder`; None unless all is float32, compiled and plain."""
    library = load_library()
    if not isinstance(library, CpuLibrary) or not isinstance(attention, CpuAttention):
        return None
    weights = [_weights(layer) for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    compiled = [layer for layer in weights if layer is not None]
    if decoder.dtype != torch.float32 or len(compiled) != len(decoder.layers):
        return None
    norm = decoder.norm
    return CpuDecoder(library, attention, compiled, norm=norm.weight.detach(), eps=norm.eps)


def _weights(layer: DecoderLayer) -> LayerWeights | None:
    """The layer's weights; None where it does what the compiled call does not."""
    linears = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
    projections = [_projection(linear) for linear in linears]
    compiled = [projection for projection in projections if projection is not None]
    plain = not layer.post_norm and layer.qk_norm == "none" and layer.residual_multiplier == 1.0
    if not plain or len(compiled) != len(linears):
        return None
    return LayerWeights(
        layer.input_layernorm.weight.detach(),
        layer.post_attention_layernorm.weight.detach(),
        tuple(compiled),
        layer.rotates,
    )


def _projection(linear: nn.Module) -> Projection | None:
    if not isinstance(linear, ProductLinear):
        return None
    if not isinstance(linear.product, Float32Linear | Int8Linear):
        return None
    return Projection(linear.product, None if linear.bias is None else linear.bias.detach())
