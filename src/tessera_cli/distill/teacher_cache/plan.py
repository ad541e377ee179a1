"""Which documents a cache holds, in which shards, and where it is: all known before the teacher runs."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tessera_cli.distill.data.corpus import Document
from tessera_cli.distill.inputs import RunInputs
from tessera_cli.distill.teacher_cache.codec import Codec
from tessera_cli.distill.teacher_cache.hidden import HiddenCodec
from tessera_cli.distill.teacher_cache.keys import document_key
from tessera_cli.distill.teacher_cache.sample import SampleCodec
from tessera_cli.distill.teacher_cache.topk import TopKCodec
from tessera_cli.errors import UsageError
from tessera_cli.recipe.schema import Recipe

# A shard ends with the first micro-batch that brings it to this many targets: a killed process loses no more.
SHARD_TARGETS = 8_192

MicroBatch = tuple[Document, ...]


@dataclass(frozen=True, eq=False)
class PlannedShard:
    """Micro-batches to run the teacher on, whole.

    `keys` are those of their documents that are kept here, which have `num_targets` targets.
    """

    micro_batches: tuple[MicroBatch, ...]
    keys: tuple[bytes, ...]
    num_targets: int

    @property
    def digest(self) -> str:
        """A hash of `keys`."""
        return hashlib.sha256(b"".join(self.keys)).hexdigest()


@dataclass(frozen=True, eq=False)
class CachePlan:
    """The cache of one split: where it is, what it depends on, how it is coded and all that is in it."""

    split: str
    path: Path
    fingerprints: dict[str, str]
    codec: Codec
    shards: tuple[PlannedShard, ...]

    @property
    def keys(self) -> Iterator[bytes]:
        """The keys of all documents, each once."""
        return (key for shard in self.shards for key in shard.keys)

    @property
    def num_targets(self) -> int:
        """The targets of all documents."""
        return sum(shard.num_targets for shard in self.shards)


def plan_caches(
    inputs: RunInputs,
    held_out: Sequence[MicroBatch],
    *,
    run_fingerprints: dict[str, str],
    teacher_dtype: torch.dtype,
    home: Path,
    shard_targets: int = SHARD_TARGETS,
) -> tuple[CachePlan, CachePlan]:
    """The caches of the training and of the `held_out` documents; these are always kept exactly.

    A document is computed in the micro-batch in which the run first sees it, so that its float32 hidden
    states are, bit for bit, those of an uncached run until it comes again, among other documents.

    Raises:
        UsageError: as many tokens are to be kept as there are.
    """
    recipe = inputs.recipe
    cache = recipe.teacher.cache
    vocab_size = inputs.student.config.vocab_size
    if cache.k is not None and cache.k >= vocab_size:
        raise UsageError(
            f"teacher.cache.k is {cache.k}, but the teacher has {vocab_size} tokens",
            hint="keep fewer, or everything with `kind: hidden`",
        )
    common = {
        "teacher": run_fingerprints["teacher"],
        "teacher dtype": str(teacher_dtype).removeprefix("torch."),
        "tokenizer": run_fingerprints["tokenizer"],
    }
    if vocab_size != inputs.teacher.config.vocab_size:  # cut before the softmax
        common["vocabulary rows"] = str(vocab_size)
    codec, described = _codec(recipe)
    micro_batches = map(tuple, inputs.first_pass())
    packing = f"rows of {recipe.data.max_seq_len}{'' if recipe.data.packing else ', not packed'}"
    packing += f", {recipe.train.micro_batch_size} in a micro-batch"
    train = common | described
    train |= {"data": run_fingerprints["data.train"], "packing": f"{packing}, seed {recipe.seed}"}
    exact = common | {"kind": "hidden", "dtype": "float32"}
    exact |= {"data": run_fingerprints["data.eval"], "packing": packing}
    return (
        CachePlan(
            "train",
            _path(recipe, "train", train, home),
            train,
            codec,
            plan_shards(micro_batches, shard_targets),
        ),
        CachePlan(
            "eval",
            _path(recipe, "eval", exact, home),
            exact,
            HiddenCodec(torch.float32),
            plan_shards(held_out, shard_targets),
        ),
    )


def _codec(recipe: Recipe) -> tuple[Codec, dict[str, str]]:
    """The training documents' codec, and what it depends on, in words."""
    cache, temperature = recipe.teacher.cache, recipe.loss.temperature
    if cache.dtype is not None:
        dtype = {"float16": torch.float16, "float32": torch.float32}[cache.dtype]
        return HiddenCodec(dtype), {"kind": "hidden", "dtype": cache.dtype}
    if cache.k is not None:
        described = {"kind": "topk", "k": str(cache.k), "temperature": f"{temperature!r}"}
        return TopKCodec(cache.k, temperature), described
    if cache.num_samples is None:
        raise ValueError("the recipe has no cache")
    described = {"kind": "sample", "num_samples": str(cache.num_samples), "temperature": f"{temperature!r}"}
    return SampleCodec(cache.num_samples, temperature, recipe.seed), described


def _path(recipe: Recipe, split: str, fingerprints: dict[str, str], home: Path) -> Path:
    if recipe.teacher.cache.path is not None:
        return Path(recipe.teacher.cache.path) / split
    name = hashlib.sha256(repr(sorted(fingerprints.items())).encode()).hexdigest()[:16]
    return home / "teacher-caches" / f"{split}-{name}"


def plan_shards(micro_batches: Iterable[MicroBatch], shard_targets: int) -> tuple[PlannedShard, ...]:
    """All documents of `micro_batches`, each once and where it comes first, in shards of `shard_targets`."""
    shards: list[PlannedShard] = []
    known: set[bytes] = set()
    batches: list[MicroBatch] = []
    keys: list[bytes] = []
    num_targets = 0
    key_of: dict[int, bytes] = {}  # by identity: the same documents come back in every epoch
    for micro_batch in micro_batches:
        new = []
        for document in micro_batch:
            key = key_of.get(id(document)) or key_of.setdefault(id(document), document_key(document))
            if key not in known:
                known.add(key)
                new.append(key)
                num_targets += document.num_supervised_tokens
        if new:
            batches.append(micro_batch)
            keys += new
        if num_targets >= shard_targets:
            shards.append(PlannedShard(tuple(batches), tuple(keys), num_targets))
            batches, keys, num_targets = [], [], 0
    if keys:
        shards.append(PlannedShard(tuple(batches), tuple(keys), num_targets))
    return tuple(shards)
