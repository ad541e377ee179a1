"""Writing, resuming, reading and checking a cache, of a tiny teacher and some documents."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera_cli.distill.data.corpus import Document, build_batch
from tessera_cli.distill.events import Event, Note
from tessera_cli.distill.students.student import forward_batch
from tessera_cli.distill.teacher_cache import layout
from tessera_cli.distill.teacher_cache.build import open_caches
from tessera_cli.distill.teacher_cache.codec import Codec
from tessera_cli.distill.teacher_cache.hidden import HiddenCodec
from tessera_cli.distill.teacher_cache.keys import batch_documents, batch_keys, document_key
from tessera_cli.distill.teacher_cache.layout import CacheDirectory
from tessera_cli.distill.teacher_cache.plan import CachePlan, plan_shards
from tessera_cli.distill.teacher_cache.reader import CacheReader
from tessera_cli.distill.teacher_cache.sample import SampleCodec
from tessera_cli.distill.teacher_cache.topk import TopKCodec
from tessera_cli.distill.teacher_cache.verify import require_complete, verify_cache
from tessera_cli.distill.teacher_cache.writer import write_cache
from tessera_cli.errors import DataError, RunError, UsageError
from tests.training_factories import make_decoder, make_documents

DOCUMENTS = tuple(make_documents([9, 4, 6, 12, 3, 8, 5, 7]))
MICRO_BATCHES = [DOCUMENTS[0:2], DOCUMENTS[2:5], DOCUMENTS[5:6], DOCUMENTS[6:8]]
EXACT = HiddenCodec(torch.float32)
CODECS = [EXACT, HiddenCodec(torch.float16), TopKCodec(5, 2.0), SampleCodec(7, 2.0, seed=3)]
FINGERPRINTS = {"teacher": "f" * 64, "kind": "hidden", "packing": "rows of 32"}


def _plan(
    path: Path, codec: Codec = EXACT, shard_targets: int = 8, batches=MICRO_BATCHES, **changed: str
) -> CachePlan:
    shards = plan_shards(batches, shard_targets)
    return CachePlan("train", path / "cache", FINGERPRINTS | changed, codec, shards)


def _write(plan: CachePlan) -> CachePlan:
    write_cache(plan, make_decoder(1), lambda event: None)
    return plan


def _reader(plan: CachePlan) -> CacheReader:
    return CacheReader(CacheDirectory(plan.path, plan.fingerprints), plan.codec)


def _files(plan: CachePlan) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in plan.path.iterdir()}


def _hidden(documents: tuple[Document, ...]) -> list[Tensor]:
    """The teacher's states at each document's targets, computed among `documents`."""
    batch = build_batch(documents)
    hidden = forward_batch(make_decoder(1), batch)[batch.target_index].detach()
    return list(hidden.split([document.num_supervised_tokens for document in documents]))


def test_a_document_has_the_same_key_in_any_batch() -> None:
    for documents in (DOCUMENTS, DOCUMENTS[::-1], DOCUMENTS[2:5]):
        batch = build_batch(documents)
        assert batch_keys(batch) == [document_key(document) for document in documents]
        for one, other in zip(batch_documents(batch), documents, strict=True):
            assert (one.token_ids == other.token_ids).all()
            assert (one.supervised == other.supervised).all()


def test_other_ids_or_other_targets_are_another_document() -> None:
    document = DOCUMENTS[0]
    ids, supervised = document.token_ids.copy(), document.supervised.copy()
    ids[0] += 1
    supervised[-1] = False
    others = [Document(ids, document.supervised), Document(document.token_ids, supervised)]
    assert len({document_key(one) for one in (document, *others)}) == 3


@pytest.mark.parametrize("shard_targets", [1, 5, 8, 13, 1000])
def test_every_document_is_found_whatever_the_shards_and_the_order(
    tmp_path: Path, shard_targets: int
) -> None:
    plan = _write(_plan(tmp_path, shard_targets=shard_targets))
    expected = [states for micro_batch in MICRO_BATCHES for states in _hidden(micro_batch)]
    reader = _reader(plan)
    head = torch.zeros(61, 16)
    for order in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 0, 5, 2], [3], [6, 6]):
        targets = reader.targets(build_batch([DOCUMENTS[i] for i in order]), head)
        assert torch.equal(targets.hidden, torch.cat([expected[i] for i in order]))


def test_a_shard_ends_with_the_micro_batch_that_fills_it() -> None:
    counts = [sum(document.num_supervised_tokens for document in batch) for batch in MICRO_BATCHES]
    assert [shard.num_targets for shard in plan_shards(MICRO_BATCHES, 1)] == counts
    assert plan_shards(MICRO_BATCHES, counts[0] + 1)[0].num_targets == sum(counts[:2])
    assert [shard.num_targets for shard in plan_shards(MICRO_BATCHES, 1000)] == [sum(counts)]


def test_a_document_that_comes_again_is_kept_once_and_runs_no_teacher() -> None:
    again = [DOCUMENTS[1:3], DOCUMENTS[0:1], (*DOCUMENTS[7:], DOCUMENTS[0])]
    once, twice = plan_shards(MICRO_BATCHES, 1000), plan_shards(MICRO_BATCHES + again, 1000)
    assert (twice[0].keys, twice[0].micro_batches) == (once[0].keys, once[0].micro_batches)
    mixed = plan_shards([DOCUMENTS[:2], (DOCUMENTS[1], DOCUMENTS[2], DOCUMENTS[2])], 1000)
    assert mixed[0].keys == tuple(document_key(document) for document in DOCUMENTS[:3])


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
def test_a_cache_that_was_killed_anywhere_ends_with_the_same_bytes(tmp_path: Path, codec: Codec) -> None:
    plan = _write(_plan(tmp_path, codec, shard_targets=1))
    whole = _files(plan)
    lines = whole[layout.RECORDS_FILE].splitlines(keepends=True)
    assert len(lines) == len(MICRO_BATCHES)
    for complete in range(len(lines)):
        # Killed in the middle of the next line, or of the next shard; what follows was never written.
        for cut in (0, 1, len(lines[complete]) - 1):
            for number in range(complete + (cut > 0), len(lines)):
                (plan.path / f"shard-{number:06d}.safetensors").unlink(missing_ok=True)
            content = b"".join(lines[:complete]) + lines[complete][:cut]
            (plan.path / layout.RECORDS_FILE).write_bytes(content)
            half = whole[f"shard-{complete:06d}.safetensors"][:100]
            (plan.path / f".shard-{complete:06d}.safetensors.tmp").write_bytes(half)
            _write(plan)
            assert _files(plan) == whole


def test_an_interrupt_keeps_the_complete_shards_and_leaves_no_half_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _files(_write(_plan(tmp_path / "whole", shard_targets=1)))
    plan = _plan(tmp_path, shard_targets=1)
    plain, calls = layout.file_sha256, []

    def interrupted(path: Path) -> str:
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(path)

    with monkeypatch.context() as patch:
        patch.setattr(layout, "file_sha256", interrupted)
        with pytest.raises(KeyboardInterrupt):
            _write(plan)
    assert sorted(_files(plan)) == [
        ".lock",
        "cache.json",
        "shard-000000.safetensors",
        "shard-000001.safetensors",
        "shards.jsonl",
    ]
    assert not _reader(plan).holds(plan.keys)
    notes: list[Event] = []
    write_cache(plan, make_decoder(1), notes.append)
    assert any(isinstance(note, Note) and "tokens already" in note.text for note in notes)
    assert _files(plan) == whole


def test_a_longer_run_adds_to_the_cache_of_a_shorter_one(tmp_path: Path) -> None:
    short = _write(_plan(tmp_path, batches=MICRO_BATCHES[:2], shard_targets=1))
    before = _files(short)
    plan = _plan(tmp_path, shard_targets=1)
    assert not _reader(plan).holds(plan.keys)
    _write(plan)
    after = _files(plan)
    assert all(after[name] == before[name] for name in before if name.endswith(".safetensors"))
    assert after == _files(_write(_plan(tmp_path / "whole", shard_targets=1)))
    assert _reader(short).holds(short.keys)


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_a_cache_of_something_else_is_refused_with_what_differs(tmp_path: Path, name: str) -> None:
    _write(_plan(tmp_path))
    changed = _plan(tmp_path, **{name: "another"})
    for use in (_reader, _write):
        with pytest.raises(UsageError, match="the cache of another run") as caught:
            use(changed)
        assert name in caught.value.message
        assert "another here" in caught.value.message
        assert not any(other in caught.value.message for other in FINGERPRINTS if other != name)


def test_a_directory_of_something_else_is_left_alone(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    plan.path.mkdir()
    (plan.path / "precious").write_text("x")
    with pytest.raises(UsageError, match="is no teacher cache"):
        _write(plan)
    assert [file.name for file in plan.path.iterdir()] == ["precious"]
    shutil.rmtree(plan.path)
    plan.path.write_text("x")
    with pytest.raises(UsageError, match="not a directory"):
        _write(plan)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    plan = _plan(tmp_path)
    with (
        CacheDirectory(plan.path, plan.fingerprints).writing(),
        pytest.raises(UsageError, match="another process"),
    ):
        _write(plan)
    _write(plan)


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layout, "save_file", full)
    with pytest.raises(RunError, match=r"cannot write .*shard-000000\.safetensors: No space left"):
        _write(_plan(tmp_path))


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_shard_that_is_gone_or_short_is_written_again_alone(tmp_path: Path, damage: str) -> None:
    plan = _write(_plan(tmp_path, shard_targets=1))
    whole = _files(plan)
    shard = plan.path / "shard-000001.safetensors"
    last = plan.path / "shard-000003.safetensors"
    kept = last.stat().st_mtime_ns
    if damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match="not complete"):
        require_complete([plan])
    _write(plan)
    assert {name: data for name, data in _files(plan).items() if name.endswith(".safetensors")} == {
        name: data for name, data in whole.items() if name.endswith(".safetensors")
    }
    assert last.stat().st_mtime_ns == kept
    require_complete([plan])


def test_a_shard_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    plan = _write(_plan(tmp_path))
    shard = plan.path / "shard-000000.safetensors"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    with pytest.raises(DataError, match="is damaged"):
        _reader(plan)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("where", [-1, -200])  # in the keys, in what is kept
def test_verification_finds_a_changed_bit_and_another_teacher(
    tmp_path: Path, codec: Codec, where: int
) -> None:
    plan = _write(_plan(tmp_path, codec))
    found = verify_cache(plan, make_decoder(1), lambda event: None)
    assert found.num_recomputed == found.num_equal > 0
    assert verify_cache(plan, make_decoder(9), lambda event: None).num_equal == 0
    shard = plan.path / "shard-000000.safetensors"
    content = bytearray(shard.read_bytes())
    content[where] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        verify_cache(plan, make_decoder(1), lambda event: None)


def test_the_teacher_is_loaded_only_for_what_is_missing(tmp_path: Path) -> None:
    loads: list[int] = []

    def load():
        loads.append(1)
        return make_decoder(1)

    plan = _plan(tmp_path)
    (first,) = open_caches([plan], load, lambda event: None)
    (second,) = open_caches([plan], load, lambda event: None)
    assert loads == [1]
    assert first.figures == second.figures
    assert first.figures.num_documents == len(DOCUMENTS)
    assert first.figures.num_tokens == sum(document.num_supervised_tokens for document in DOCUMENTS)
    sizes = sum(file.stat().st_size for file in plan.path.glob("*.safetensors"))
    assert first.figures.file_bytes == sizes
    assert (first.figures.kept_mass, first.figures.kl) == (1.0, 0.0)
