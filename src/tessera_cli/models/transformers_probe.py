"""Whether a model of transformers computes nothing but what we page, found out with a few tokens."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from tessera_cli.attention import AttentionLayer

if TYPE_CHECKING:
    from tessera_cli.models.transformers_model import TransformersConfig, TransformersModel

# Names of attention implementations: transformers' own, ours, and ours while probing.
EAGER = "eager"
PAGED = "tessera"
_PROBE = "tessera_probe"
_NUM_TOKENS = 12
# A position beyond any window.
_FAR = 1 << 28


class UnpageableError(Exception):
    """Why a model cannot run over a paged cache."""


class _Recorder:
    """Attends plainly over the one sequence of the probe and notes how each layer asked for it."""

    def __init__(self) -> None:
        self.layers: dict[int, AttentionLayer] = {}

    def attend(self, index: int, layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[num_tokens, heads, head_dim] -> like `q`."""
        if index in self.layers:
            raise UnpageableError(f"layer {index} attends more than once")
        self.layers[index] = layer
        k, v = (x.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * layer.scale
        if layer.logits_soft_cap is not None:
            scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
        tokens = torch.arange(len(q), device=q.device)
        distance = tokens[:, None] - tokens
        seen = (distance >= 0) & (distance < (layer.sliding_window or len(q)))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
        return torch.einsum("hqk,khd->qhd", weights, v)


@torch.inference_mode()
def probe_layers(
    wrapped: "TransformersModel", model: Any, config: "TransformersConfig"
) -> tuple[AttentionLayer, ...]:
    """How each layer of `model` attends; it is left with another attention implementation.

    Three things are tried: each layer asks us for attention once; with it, logits are those that the model
    computes by itself; without it, no token changes what is computed of another one.

    Raises:
        UnpageableError: one of them fails.
    """
    device, dtype = wrapped.device, wrapped.dtype
    tokens = torch.arange(3, 3 + _NUM_TOKENS, device=device) % config.vocab_size
    positions = torch.arange(_NUM_TOKENS, device=device)
    recorder = _Recorder()
    try:
        model.set_attn_implementation(_PROBE)
        ours = wrapped.logits(wrapped(tokens, positions, recorder.attend))
        model.set_attn_implementation(EAGER)
        theirs = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        line = (str(error).strip().splitlines() or [""])[0]
        raise UnpageableError(f"a few tokens through it end in {type(error).__name__}: {line}") from error
    num_layers = config.num_hidden_layers
    if set(recorder.layers) != set(range(num_layers)):
        raise UnpageableError(f"{len(recorder.layers)} of its {num_layers} layers attend through us")
    if theirs.shape[1] != config.vocab_size or not _close(ours, theirs, dtype):
        raise UnpageableError("its logits over our attention are not those that it computes by itself")
    _check_isolation(wrapped, model, tokens, positions)
    return tuple(recorder.layers[index] for index in range(num_layers))


def _check_isolation(wrapped: "TransformersModel", model: Any, tokens: Tensor, positions: Tensor) -> None:
    """Without attention the last token's state must not depend on the tokens before it."""

    def blind(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.zeros_like(q)

    model.set_attn_implementation(PAGED)
    whole = wrapped(tokens, positions, blind)[-1:]
    if not _close(wrapped(tokens[-1:], positions[-1:], blind), whole, wrapped.dtype):
        raise UnpageableError("its tokens reach each other beside attention")


def _close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Whether two computations in `dtype` are the same one; another one is off by its whole range.

    Sixteen bits round at each layer, so that the largest of many differences says little: their mean counts.
    """
    difference = (ours.float() - theirs.float()).abs()
    if dtype is torch.float32:
        return bool((difference <= 0.05 * theirs.float().std()).all())
    return bool(difference.square().mean().sqrt() <= 0.1 * theirs.float().std())


def _record(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The probe's attention function; `attention_mask` is what `_window_as_mask` made."""
    if query.shape[-1] != value.shape[-1]:
        raise UnpageableError("its keys and values differ in size")
    layer = AttentionLayer(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=None if attention_mask is None else int(attention_mask) or None,
        logits_soft_cap=None if softcap is None else float(softcap),
    )
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(module.layer_idx, layer, q, k, v)[None], None


def _window_as_mask(*_: Any, mask_function: Any, device: Any = None, **__: Any) -> Tensor:
    """Instead of a mask, the window that it would cut out, in tokens; 0 for none."""

    def first_seen(position: int) -> int:
        low, high = 0, position
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if sees(position, middle) else (middle + 1, high)
        return low

    def sees(position: int, other: int) -> bool:
        zero = torch.tensor(0)
        return bool(mask_function(zero, zero, torch.tensor(position), torch.tensor(other)))

    windows = {position - first_seen(position) + 1 for position in (_FAR, _FAR + 1)}
    causal = sees(_FAR, _FAR) and not sees(_FAR, _FAR + 1)
    if causal and windows == {_FAR + 1, _FAR + 2}:
        return torch.tensor(0, device=device)
    if not causal or len(windows) > 1:
        raise UnpageableError("its mask is neither causal nor a sliding window")
    return torch.tensor(windows.pop(), device=device)


AttentionInterface.register(_PROBE, _record)
AttentionMaskInterface.register(_PROBE, _window_as_mask)
