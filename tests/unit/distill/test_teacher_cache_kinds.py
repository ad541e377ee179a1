"""What each kind keeps of a teacher, and what can be made of it again."""

import math

import pytest
import torch
from torch import Tensor

from tessera_cli.distill.losses.dense import forward_kl
from tessera_cli.distill.teacher_cache.codec import Codec, id_dtype, log_probs
from tessera_cli.distill.teacher_cache.hidden import HiddenCodec
from tessera_cli.distill.teacher_cache.sample import SampleCodec, draw
from tessera_cli.distill.teacher_cache.topk import TopKCodec
from tessera_cli.errors import UsageError

TOKENS, VOCAB, HIDDEN = 150, 97, 12  # more tokens than a chunk of the writer
KEY = b"0123456789abcdef"


def _hidden(seed: int = 0, tokens: int = TOKENS) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed))


HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))
CODECS = [HiddenCodec(torch.float16), TopKCodec(8, 2.0), SampleCodec(20, 2.0, seed=1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float32_holds_every_teacher_exactly(dtype: torch.dtype) -> None:
    hidden = _hidden().to(dtype)
    tensors, kept = HiddenCodec(torch.float32).encode(hidden, HEAD, KEY)
    targets = HiddenCodec(torch.float32).decode([tensors], HEAD)
    assert torch.equal(targets.hidden, hidden.float())
    assert targets.head is HEAD
    assert kept.kl == 0.0


def test_float16_is_within_a_thousandth_of_a_nat_and_says_how_near() -> None:
    hidden = _hidden()
    tensors, kept = HiddenCodec(torch.float16).encode(hidden, HEAD, KEY)
    exact, cached = log_probs(hidden, HEAD, 1.0), log_probs(tensors["hidden"], HEAD, 1.0)
    assert 0 < forward_kl(exact, cached).mean() < 1e-5
    assert kept.kl / kept.targets == pytest.approx(
        forward_kl(exact, cached)[: kept.targets].mean().item(), rel=0.1
    )


def test_states_beyond_float16_are_refused() -> None:
    hidden = _hidden()
    hidden[3, 2] = 1e5
    with pytest.raises(UsageError, match="too large for float16"):
        HiddenCodec(torch.float16).encode(hidden, HEAD, KEY)
    HiddenCodec(torch.float32).encode(hidden, HEAD, KEY)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("k", [1, 8, VOCAB - 1])
def test_topk_gives_back_a_distribution_near_the_teachers(k: int, temperature: float) -> None:
    codec = TopKCodec(k, temperature)
    hidden = _hidden()
    tensors, kept = codec.encode(hidden, HEAD, KEY)
    targets = codec.decode([tensors], HEAD)
    p = log_probs(hidden, HEAD, temperature).double().exp()
    likeliest, ids = p.topk(k, -1)
    assert torch.equal(targets.ids, ids)
    q = targets.log_probs.double().exp()
    torch.testing.assert_close(q.sum(-1), torch.ones(TOKENS, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(q[:, :-1], likeliest, rtol=5e-3, atol=1e-6)
    torch.testing.assert_close(q[:, -1], 1 - likeliest.sum(-1), rtol=1e-4, atol=1e-6)
    assert kept.mass == pytest.approx(likeliest.sum().item(), rel=1e-5)


def test_topk_tells_the_kl_to_the_rest_spread_evenly() -> None:
    hidden = _hidden()
    _, kept = TopKCodec(8, 2.0).encode(hidden, HEAD, KEY)
    p = log_probs(hidden, HEAD, 2.0).double().exp()
    likeliest, ids = p.topk(8, -1)
    even = ((1 - likeliest.sum(-1, keepdim=True)) / (VOCAB - 8)).expand(-1, VOCAB).scatter(1, ids, likeliest)
    assert kept.kl == pytest.approx((p * (p / even).log()).sum().item(), rel=1e-4)


def test_a_sure_teacher_leaves_no_nan() -> None:
    hidden = 200 * _hidden(tokens=5)
    for codec in (TopKCodec(8, 1.0), SampleCodec(20, 1.0, seed=1)):
        tensors, kept = codec.encode(hidden, HEAD, KEY)
        assert math.isfinite(kept.kl)
        targets = codec.decode([tensors], HEAD)
        values = targets.log_probs if isinstance(codec, TopKCodec) else targets.entropy
        assert not values.isnan().any()


def test_draws_are_distributed_as_the_teacher() -> None:
    """Each id's frequency lies within five standard errors of its probability, also of a rare one."""
    p = torch.tensor([[0.0, 0.5, 0.25, 0.0, 0.2, 0.049, 0.001, 0.0]], dtype=torch.float64)
    num_samples = 200_000
    drawn = draw(p.log(), num_samples, torch.Generator().manual_seed(0))
    shares = drawn[0].bincount(minlength=8) / num_samples
    error = (p[0] * (1 - p[0]) / num_samples).sqrt()
    assert ((shares - p[0]).abs() <= 5 * error).all()


def test_the_mean_of_many_seeds_is_the_teacher() -> None:
    hidden = _hidden(tokens=6)
    p = log_probs(hidden, HEAD, 2.0).double().exp()
    total = torch.zeros(6, VOCAB, dtype=torch.float64)
    num_seeds = 300
    for seed in range(num_seeds):
        codec = SampleCodec(20, 2.0, seed=seed)
        targets = codec.decode([codec.encode(hidden, HEAD, KEY)[0]], HEAD)
        torch.testing.assert_close(targets.shares.sum(-1), torch.ones(6))
        total.scatter_add_(1, targets.ids, targets.shares.double())
    error = (p * (1 - p) / (20 * num_seeds)).sqrt()
    assert ((total / num_seeds - p).abs() <= 6 * error + 1e-9).all()


def test_draws_depend_on_seed_and_document_alone() -> None:
    hidden = _hidden()

    def drawn(codec: SampleCodec, key: bytes) -> Tensor:
        return codec.encode(hidden, HEAD, key)[0]["ids"]

    first = drawn(SampleCodec(20, 2.0, seed=1), KEY)
    torch.rand(3)
    assert torch.equal(drawn(SampleCodec(20, 2.0, seed=1), KEY), first)
    assert not torch.equal(drawn(SampleCodec(20, 2.0, seed=2), KEY)[:50], first[:50])
    assert not torch.equal(drawn(SampleCodec(20, 2.0, seed=1), KEY[::-1])[:50], first[:50])


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_documents_are_put_together_in_order(codec: Codec) -> None:
    parts = [codec.encode(_hidden(seed, tokens), HEAD, KEY)[0] for seed, tokens in ((1, 3), (2, 140), (3, 1))]
    whole = codec.decode(parts, HEAD)
    first = 0
    for part, tokens in zip(parts, (3, 140, 1), strict=True):
        alone = codec.decode([part], HEAD)
        for name in ("hidden", "ids", "log_probs", "shares", "entropy"):
            if hasattr(whole, name):
                rows = getattr(whole, name)[first : first + tokens]
                own = getattr(alone, name)
                width = own.shape[-1] if own.ndim > 1 else None
                assert torch.equal(rows[:, :width] if width else rows, own)
        first += tokens


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, torch.uint16), (65_537, torch.int32)])
def test_every_id_fits(vocab_size: int, dtype: torch.dtype) -> None:
    assert id_dtype(vocab_size) == dtype
    assert torch.tensor([vocab_size - 1]).to(dtype).long().item() == vocab_size - 1
