"""What the caches of a run will cost, known before the teacher runs; no torch."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tessera_cli.distill.data.document import Document
from tessera_cli.distill.evaluation.held_out import measured_documents
from tessera_cli.distill.inputs import RunInputs
from tessera_cli.distill.teacher_cache.keys import document_key
from tessera_cli.recipe.cache_section import CacheKind, TeacherCacheSection

_FLOAT_BYTES = {"float16": 2, "float32": 4}


@dataclass(frozen=True)
class CacheCost:
    """The caches of a run that begins with none.

    Attributes:
        bytes_per_token: of a supervised token of the training documents; of `sample` the most that it can be.
        num_tokens: these tokens, each document once.
        train_bytes: of all of them, without the 40 bytes or so that come with each document.
        eval_bytes: of the held-out documents that are measured on, hidden states in float32.
        gflop: what the teacher computes once, for the training documents; of `hidden` all but its head.
    """

    kind: CacheKind
    bytes_per_token: int
    num_tokens: int
    train_bytes: int
    eval_bytes: int
    gflop: float


def cache_cost(inputs: RunInputs) -> CacheCost | None:
    """The cost of the cache that the recipe asks for, None where it asks for none."""
    cache, teacher = inputs.recipe.teacher.cache, inputs.teacher.config
    if cache.kind == "none":
        return None
    once = _distinct(document for batch in inputs.first_pass() for document in batch)
    held_out = _distinct(measured_documents(inputs.eval.documents, max_targets=inputs.recipe.eval.max_tokens))
    num_tokens = _num_targets(once)
    per_token = bytes_per_token(
        cache, hidden_size=teacher.hidden_size, vocab_size=inputs.student.config.vocab_size
    )
    head_parameters = teacher.hidden_size * teacher.vocab_size if cache.kind == "hidden" else 0
    flops_per_token = teacher.flops_per_token() - 2 * head_parameters
    return CacheCost(
        kind=cache.kind,
        bytes_per_token=per_token,
        num_tokens=num_tokens,
        train_bytes=num_tokens * per_token,
        eval_bytes=_num_targets(held_out) * teacher.hidden_size * _FLOAT_BYTES["float32"],
        gflop=flops_per_token * sum(len(document.token_ids) for document in once) / 1e9,
    )


def _distinct(documents: Iterable[Document]) -> Collection[Document]:
    return {document_key(document): document for document in documents}.values()


def _num_targets(documents: Iterable[Document]) -> int:
    return sum(document.num_supervised_tokens for document in documents)


def bytes_per_token(cache: TeacherCacheSection, *, hidden_size: int, vocab_size: int) -> int:
    """What the codec of `cache` keeps of a token; of `sample` where no token is drawn twice."""
    id_bytes = 2 if vocab_size <= 2**16 else 4
    if cache.dtype is not None:
        return _FLOAT_BYTES[cache.dtype] * hidden_size
    if cache.k is not None:  # ids, float16 log-probabilities, and the rest's
        return cache.k * (id_bytes + 2) + 4
    num_samples = cache.num_samples or 0  # ids, how often each came, how many there are, and the entropy
    return num_samples * (id_bytes + (1 if num_samples < 2**8 else 4)) + 8
