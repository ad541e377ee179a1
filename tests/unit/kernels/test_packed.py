import pytest
import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.kernels.packed import PackedAttention, attend_per_document

CU_SEQLENS = [0, 5, 6, 18, 20, 27]  # lengths 5, 1, 12, 2, 7: four groups


def _layer(
    num_kv_heads: int = 2, *, scale: float = 8**-0.5, window: int | None = None, soft_cap: float | None = None
) -> AttentionLayer:
    return AttentionLayer(4, num_kv_heads, 8, scale, window, soft_cap)


VARIANTS = [
    _layer(1),
    _layer(2),
    _layer(4),
    _layer(scale=0.9),
    _layer(window=1),
    _layer(4, window=4),
    _layer(window=7),
    _layer(window=12),
    _layer(soft_cap=0.7),
    _layer(1, scale=1.0, window=3, soft_cap=2.0),
]


def _qkv(num_tokens: int, *, num_kv_heads: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (4, num_kv_heads, num_kv_heads)
    return [torch.randn(num_tokens, h, 8, generator=generator).requires_grad_() for h in heads]


def _by_definition(cu_seqlens: list[int], layer: AttentionLayer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as one masked softmax over all tokens, in float64."""
    q, k, v = (tensor.detach().double() for tensor in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    index = torch.arange(len(q))
    document = torch.bucketize(index, torch.tensor(cu_seqlens[1:]), right=True)
    visible = (document[:, None] == document) & (index[:, None] >= index)
    if layer.sliding_window is not None:
        visible &= index[:, None] - layer.sliding_window + 1 <= index
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    if layer.logits_soft_cap is not None:
        scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("layer", VARIANTS, ids=str)
@pytest.mark.parametrize("cu_seqlens", [CU_SEQLENS, [0, 27], [0, 9, 18, 27], list(range(28))])
def test_it_is_causal_attention_within_each_document(cu_seqlens: list[int], layer: AttentionLayer) -> None:
    q, k, v = _qkv(27, num_kv_heads=layer.num_kv_heads)
    expected = _by_definition(cu_seqlens, layer, q, k, v)
    packed = PackedAttention(cu_seqlens, [layer]).attend(0, q, k, v)
    torch.testing.assert_close(packed.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        attend_per_document(cu_seqlens, layer, q, k, v).double(), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("layer", VARIANTS, ids=str)
def test_gradients_equal_those_of_one_document_after_the_other(layer: AttentionLayer) -> None:
    inputs = _qkv(27, num_kv_heads=layer.num_kv_heads)
    direction = torch.randn(27, 4, 8, generator=torch.Generator().manual_seed(1))
    packed = PackedAttention(CU_SEQLENS, [layer]).attend(0, *inputs)
    plain = attend_per_document(CU_SEQLENS, layer, *inputs)
    gradients = (torch.autograd.grad((out * direction).sum(), inputs) for out in (packed, plain))
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_each_layer_attends_as_it_says() -> None:
    inputs = _qkv(27, num_kv_heads=2)
    layers = [_layer(window=3), _layer(), _layer(soft_cap=1.0)]
    attention = PackedAttention(CU_SEQLENS, layers)
    for index, layer in enumerate(layers):
        expected = _by_definition(CU_SEQLENS, layer, *inputs)
        torch.testing.assert_close(attention.attend(index, *inputs).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [3.0, float("nan"), float("inf")])
def test_another_document_changes_no_bit(value: float) -> None:
    attention = PackedAttention(CU_SEQLENS, [_layer()])
    inputs = [tensor.detach() for tensor in _qkv(27, num_kv_heads=2)]
    before = attention.attend(0, *inputs)
    for tensor in inputs:
        tensor[6:18] = value
    after = attention.attend(0, *inputs)
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[18:], after[18:])
    assert not torch.equal(before[6:18], after[6:18])


def test_a_document_has_no_gradient_in_another_one() -> None:
    inputs = _qkv(27, num_kv_heads=2)
    PackedAttention(CU_SEQLENS, [_layer()]).attend(0, *inputs)[6:18].sum().backward()
    for tensor in inputs:
        assert tensor.grad is not None
        assert tensor.grad[:6].count_nonzero() == tensor.grad[18:].count_nonzero() == 0


def test_padding_adds_at_most_a_quarter() -> None:
    lengths = [1000, *[33] * 20, 63, *[65] * 9, 127, *range(1, 40)]
    cu_seqlens = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    assert PackedAttention(cu_seqlens, [_layer()]).num_slots <= 1.25 * cu_seqlens[-1]


@pytest.mark.parametrize("cu_seqlens", [[], [0], [1, 4], [0, 4, 4], [0, 5, 3]])
def test_bounds_that_describe_no_documents_are_refused(cu_seqlens: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must start at 0 and increase"):
        PackedAttention(cu_seqlens, [_layer()])
