"""The oracles are written from the definitions, over whole float64 distributions."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tessera_cli.distill.losses.chunked import DistillationSums
from tessera_cli.distill.losses.dense import chunked_distillation_loss
from tessera_cli.distill.losses.sparse import sampled_distillation_loss, topk_distillation_loss
from tessera_cli.recipe.schema import LossSection

KINDS = ["forward_kl", "reverse_kl", "jsd", "skew_kl", "skew_reverse_kl", "tvd"]
WEIGHT = 0.3
TOKENS, VOCAB, HIDDEN, K = 9, 31, 6, 4


def _section(kind: str = "forward_kl", **keys: Any) -> LossSection:
    mixture = {"mixture_weight": WEIGHT} if kind in ("jsd", "skew_kl", "skew_reverse_kl") else {}
    return LossSection(kind=kind, **mixture, **keys)


def _inputs(scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "student_hidden": (scale * torch.randn(TOKENS, HIDDEN, generator=generator)).requires_grad_(),
        "student_head": torch.randn(VOCAB, HIDDEN, generator=generator).requires_grad_(),
        "target_ids": torch.randint(0, VOCAB, (TOKENS,), generator=generator),
    }


def _teacher(seed: int = 1) -> Tensor:
    """A teacher's distributions, float64 [tokens, vocab]."""
    logits = 2 * torch.randn(
        TOKENS, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return logits.softmax(-1)


def _topk(p: Tensor, k: int = K) -> dict[str, Tensor]:
    kept, ids = p.topk(k, -1)
    rest = p.scatter(1, ids, 0.0).sum(-1, keepdim=True)
    return {"teacher_ids": ids, "teacher_log_probs": torch.cat([kept, rest], -1).log().float()}


def _drawn(p: Tensor) -> dict[str, Tensor]:
    ids = p.multinomial(6, replacement=True, generator=torch.Generator().manual_seed(2))
    # Padding repeats an id with a share of 0.
    shares = torch.cat([torch.full((TOKENS, 6), 1 / 6), torch.zeros(TOKENS, 1)], -1)
    return {
        "drawn_ids": torch.cat([ids, ids[:, :1]], -1),
        "shares": shares,
        "entropy": -(p * p.log()).sum(-1).float(),
    }


def _divergence(kind: str, p: Tensor, q: Tensor) -> Tensor:
    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum()

    mixture = WEIGHT * p + (1 - WEIGHT) * q
    return {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "jsd": lambda: WEIGHT * kl(p, mixture) + (1 - WEIGHT) * kl(q, mixture),
        "skew_kl": lambda: kl(p, mixture),
        "skew_reverse_kl": lambda: kl(q, mixture),
        "tvd": lambda: (p - q).abs().sum() / 2,
    }[kind]()


def _topk_oracle(
    section: LossSection, kept: dict[str, Tensor], inputs: dict, hidden: Tensor, head: Tensor
) -> Tensor:
    logits = hidden @ head.T
    q = (logits / section.temperature).softmax(-1)
    ids = kept["teacher_ids"]
    outside = torch.ones(TOKENS, VOCAB, dtype=torch.float64).scatter(1, ids, 0.0)
    buckets = torch.cat([q.gather(1, ids), (q * outside).sum(-1, keepdim=True)], -1)
    kd = _divergence(section.kind, kept["teacher_log_probs"].double().exp(), buckets)
    return _mixed(section, kd, logits, inputs)


def _sampled_oracle(
    section: LossSection, drawn: dict[str, Tensor], inputs: dict, hidden: Tensor, head: Tensor
) -> Tensor:
    logits = hidden @ head.T
    weights = torch.zeros(TOKENS, VOCAB, dtype=torch.float64)
    weights.scatter_add_(1, drawn["drawn_ids"], drawn["shares"].double())
    log_q = (logits / section.temperature).softmax(-1).log()
    return _mixed(section, -(weights * log_q).sum() - drawn["entropy"].double().sum(), logits, inputs)


def _mixed(section: LossSection, kd: Tensor, logits: Tensor, inputs: dict) -> Tensor:
    ce = -logits.softmax(-1)[torch.arange(TOKENS), inputs["target_ids"]].log().sum()
    return section.kd_weight * section.temperature**2 * kd + section.ce_weight * ce


CASES = [("topk", kind) for kind in KINDS] + [("sample", "forward_kl")]


def _case(name: str, p: Tensor) -> tuple[Any, Any]:
    """The loss with its teacher bound, and its oracle."""
    if name == "topk":
        kept = _topk(p)
        return partial(topk_distillation_loss, **kept), partial(_topk_oracle, kept=kept)
    drawn = _drawn(p)
    return partial(sampled_distillation_loss, **drawn), partial(_sampled_oracle, drawn=drawn)


def _gradients(sums: DistillationSums, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(sums.loss / TOKENS, [inputs["student_hidden"], inputs["student_head"]])


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize(("kd_weight", "ce_weight"), [(1.0, 0.0), (0.7, 0.4), (0.0, 1.0)])
def test_loss_and_gradient_equal_the_definition(
    name: str, kind: str, temperature: float, kd_weight: float, ce_weight: float
) -> None:
    section = _section(kind, temperature=temperature, kd_weight=kd_weight, ce_weight=ce_weight)
    inputs = _inputs()
    loss, oracle = _case(name, _teacher())
    exact = [inputs[key].detach().double().requires_grad_() for key in ("student_hidden", "student_head")]
    expected = oracle(section, inputs=inputs, hidden=exact[0], head=exact[1])
    sums = loss(**inputs, loss=section, chunk_tokens=4)
    torch.testing.assert_close(sums.loss.double(), expected, rtol=5e-6, atol=1e-5)
    gradients = torch.autograd.grad(expected / TOKENS, exact)
    for gradient, correct in zip(_gradients(sums, inputs), gradients, strict=True):
        torch.testing.assert_close(gradient.double(), correct, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_gradient_equals_finite_differences(name: str, kind: str) -> None:
    section = _section(kind, temperature=2.0, ce_weight=0.5)
    inputs = _inputs()
    loss, oracle = _case(name, _teacher())
    hidden, head = (inputs[key].detach().double() for key in ("student_hidden", "student_head"))
    generator = torch.Generator().manual_seed(3)
    d_hidden, d_head = (
        torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (hidden, head)
    )
    eps = 1e-6
    ahead, behind = (
        oracle(section, inputs=inputs, hidden=hidden + sign * eps * d_hidden, head=head + sign * eps * d_head)
        for sign in (1, -1)
    )
    gradients = _gradients(loss(**inputs, loss=section, chunk_tokens=4), inputs)
    slope = (gradients[0].double() * d_hidden).sum() + (gradients[1].double() * d_head).sum()
    torch.testing.assert_close(slope, (ahead - behind) / (2 * eps) / TOKENS, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "kind"), CASES)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 256])
def test_the_chunk_size_changes_nothing(name: str, kind: str, chunk_tokens: int) -> None:
    section = _section(kind, temperature=2.0, ce_weight=0.5)
    inputs = _inputs()
    loss, _ = _case(name, _teacher())
    whole, chunked = (loss(**inputs, loss=section, chunk_tokens=size) for size in (TOKENS, chunk_tokens))
    torch.testing.assert_close(tuple(chunked), tuple(whole), rtol=1e-5, atol=1e-5)
    for one, other in zip(_gradients(whole, inputs), _gradients(chunked, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4, 30])
def test_topk_is_never_negative_and_never_more_than_the_whole_divergence(kind: str, k: int) -> None:
    section = _section(kind)
    inputs = _inputs()
    p = _teacher()
    kept = _topk(p, k)
    sums = topk_distillation_loss(**inputs, **kept, loss=section, chunk_tokens=4)
    q = (inputs["student_hidden"] @ inputs["student_head"].T).detach().double().softmax(-1)
    whole = _divergence(kind, p, q)
    assert -1e-5 <= sums.kd.item() <= whole.item() + 1e-4
    if k == VOCAB - 1:
        assert sums.kd.item() == pytest.approx(whole.item(), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_equals_its_teacher_has_nothing_to_learn_from_topk(kind: str) -> None:
    inputs = _inputs()
    p = (inputs["student_hidden"] @ inputs["student_head"].T).detach().double().softmax(-1)
    sums = topk_distillation_loss(**inputs, **_topk(p), loss=_section(kind), chunk_tokens=4)
    assert abs(sums.kd.item()) < 1e-4
    if kind == "tvd":  # it has a kink here
        return
    for gradient in _gradients(sums, inputs):
        assert gradient.abs().max() < 1e-4


def test_mass_outside_the_kept_tokens_is_paid_for() -> None:
    """Renormalising both sides over the kept tokens would find nothing wrong with this student."""
    p = torch.tensor([[0.6, 0.38, 0.01, 0.01]], dtype=torch.float64)
    q = torch.tensor([[0.006, 0.0038, 0.98, 0.0102]])
    inputs = {"student_hidden": q.log(), "student_head": torch.eye(4), "target_ids": torch.tensor([0])}
    sums = topk_distillation_loss(**inputs, **_topk(p, 2), loss=_section(), chunk_tokens=4)
    assert sums.kd.item() > 4


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_extreme_logits_have_finite_gradients(name: str, kind: str) -> None:
    inputs = _inputs(scale=60.0)
    loss, _ = _case(name, _teacher())
    sums = loss(**inputs, loss=_section(kind, ce_weight=1.0), chunk_tokens=4)
    assert sums.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in _gradients(sums, inputs))


@pytest.mark.parametrize("kind", ["forward_kl", "tvd"])
def test_a_teacher_that_is_sure_has_no_rest(kind: str) -> None:
    inputs = _inputs()
    log_probs = torch.cat([torch.zeros(TOKENS, 1), torch.full((TOKENS, 2), -torch.inf)], -1)
    kept = {"teacher_ids": torch.tensor([[3, 5]] * TOKENS), "teacher_log_probs": log_probs}
    sums = topk_distillation_loss(**inputs, **kept, loss=_section(kind), chunk_tokens=4)
    assert sums.loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in _gradients(sums, inputs))


def test_drawn_tokens_are_unbiased_in_loss_and_gradient() -> None:
    """The mean over many independent draws is that of the whole forward KL, within its standard error."""
    inputs = _inputs()
    teacher_hidden = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    teacher_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(6))
    section = _section(temperature=2.0)
    exact = chunked_distillation_loss(
        **inputs, teacher_hidden=teacher_hidden, teacher_head=teacher_head, loss=section, chunk_tokens=TOKENS
    )
    (expected,) = torch.autograd.grad(exact.loss, inputs["student_hidden"])
    p = (teacher_hidden @ teacher_head.T / 2).double().softmax(-1)
    entropy = -(p * p.log()).sum(-1).float()
    generator = torch.Generator().manual_seed(7)
    values, gradients = [], []
    for _ in range(400):
        ids = p.multinomial(5, replacement=True, generator=generator)
        shares = torch.full(ids.shape, 0.2)
        sums = sampled_distillation_loss(
            **inputs, drawn_ids=ids, shares=shares, entropy=entropy, loss=section, chunk_tokens=TOKENS
        )
        values.append(sums.kd.item())
        gradients.append(torch.autograd.grad(sums.loss, inputs["student_hidden"])[0])
    samples = torch.stack(gradients).double()
    error = samples.std(0) / len(samples) ** 0.5
    assert ((samples.mean(0) - expected).abs() < 5 * error).all()
    spread = torch.tensor(values).std().item() / len(values) ** 0.5
    assert abs(sum(values) / len(values) - exact.kd.item()) < 5 * spread


class _LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(t.numel() for t in (result,) if isinstance(t, Tensor))])
        return result


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_tensor_holds_the_logits_of_more_than_a_chunk(name: str, kind: str) -> None:
    inputs = _inputs()
    loss, _ = _case(name, _teacher())
    with _LargestTensor() as largest:
        loss(**inputs, loss=_section(kind, ce_weight=0.5), chunk_tokens=7).loss.backward()
    assert largest.numel == 7 * VOCAB


def test_what_cannot_be_learnt_from_is_refused() -> None:
    inputs = _inputs()
    kept, drawn = _topk(_teacher()), _drawn(_teacher())
    with pytest.raises(ValueError, match="forward_kl only, not jsd"):
        sampled_distillation_loss(**inputs, **drawn, loss=_section("jsd"), chunk_tokens=4)
    with pytest.raises(ValueError, match="a share for each"):
        sampled_distillation_loss(
            **inputs, **drawn | {"shares": drawn["shares"][1:]}, loss=_section(), chunk_tokens=4
        )
    with pytest.raises(ValueError, match="and of the rest"):
        topk_distillation_loss(
            **inputs,
            **kept | {"teacher_log_probs": kept["teacher_log_probs"][:, 1:]},
            loss=_section(),
            chunk_tokens=4,
        )
    with pytest.raises(ValueError, match="the same positions"):
        topk_distillation_loss(
            **inputs | {"target_ids": inputs["target_ids"][1:]}, **kept, loss=_section(), chunk_tokens=4
        )
