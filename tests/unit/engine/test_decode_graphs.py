"""Decode steps through captured graphs equal those run kernel by kernel; a stand-in captures on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tessera_cli.engine import model_runner
from tessera_cli.engine.batch import Batch
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.decode_graphs import DecodeGraphs, graph_sizes, pad_decodes
from tessera_cli.engine.loading import EngineOptions, load_engine
from tessera_cli.engine.model_runner import ModelRunner
from tessera_cli.errors import RunError
from tessera_cli.kernels.backend import AttentionMetadata
from tessera_cli.kernels.reference import ReferenceAttention
from tessera_cli.models.decoder import Decoder
from tests.engines import greedy, random_prompts, tiny_decoder
from tests.recorder import Recorder, engine_with_graphs

CPU = torch.device("cpu")
BLOCK_SIZE = 4
CONFIG = EngineConfig(num_blocks=60, max_model_len=64, block_size=BLOCK_SIZE, max_num_seqs=12)


@pytest.fixture(scope="module")
def decoder(tiny_model_dir: Path) -> Decoder:
    return tiny_decoder(tiny_model_dir)


def decodes(lengths: list[int], tables: list[list[int]]) -> Batch:
    """The last token of sequences of `lengths` tokens in the blocks of `tables`."""
    width = max(-(-length // BLOCK_SIZE) for length in lengths)
    positions = torch.tensor(lengths) - 1
    padded = torch.tensor([(table + [0] * width)[:width] for table in tables], dtype=torch.int32)
    blocks = padded.gather(1, (positions // BLOCK_SIZE)[:, None])[:, 0].long()
    return Batch(
        input_ids=positions + 5,
        positions=positions,
        first_rows=tuple(range(len(lengths))),
        metadata=AttentionMetadata(
            query_start_loc=torch.arange(len(lengths) + 1, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=padded,
            slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            max_query_len=1,
            max_seq_len=max(lengths),
        ),
    )


def tensors(batch: Batch) -> dict[str, Tensor]:
    named = vars(batch) | vars(batch.metadata)
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


@given(max_num_seqs=st.integers(1, 600))
def test_a_graph_holds_every_step_and_is_seldom_twice_as_large(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert list(sizes) == sorted(set(sizes))
    assert max_num_seqs <= sizes[-1] < max_num_seqs + 8
    for num_seqs in range(1, max_num_seqs + 1):
        least = min(size for size in sizes if size >= num_seqs)
        assert least < 2 * num_seqs
        assert least < num_seqs + 8


def test_steps_with_a_prompt_run_without_a_graph(decoder: Decoder) -> None:
    engine, recorder = engine_with_graphs(decoder)
    engine.add_request("a", random_prompts([9])[0], greedy(4))
    engine.step()
    engine.step()
    assert recorder.replayed == [1]
    engine.add_request("b", random_prompts([9], seed=1)[0], greedy(4))
    engine.step()
    assert recorder.replayed == [1]
    engine.step()
    assert recorder.replayed == [1, 2]


LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=12)


@given(steps=st.lists(LENGTHS, min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_every_replay_sees_its_padded_step_alone_where_the_capture_read(steps: list[list[int]]) -> None:
    seen: dict[int, list[tuple[dict[str, Tensor], dict[str, int], int]]] = {}

    def forward(batch: Batch) -> Tensor:
        found = {name: tensor.clone() for name, tensor in tensors(batch).items()}
        places = {name: tensor.data_ptr() for name, tensor in tensors(batch).items()}
        seen.setdefault(len(batch.input_ids), []).append((found, places, batch.metadata.max_seq_len))
        return batch.positions[:, None].float()

    graphs = DecodeGraphs(forward, Recorder(), CONFIG, CPU)
    assert list(seen) == sorted(graphs.sizes, reverse=True)
    next_block = 1
    for lengths in steps:
        tables = [[next_block + 7 * row + column for column in range(16)] for row in range(len(lengths))]
        next_block += 5
        batch = decodes(lengths, tables)
        assert graphs.takes(batch)
        hidden = graphs(batch)
        assert hidden[:, 0].tolist() == [length - 1 for length in lengths]
        size = min(size for size in graphs.sizes if size >= len(lengths))
        (_, at_capture, bound), (found, at_replay, longest) = seen[size][0], seen[size][-1]
        assert at_replay == at_capture
        assert longest == bound == CONFIG.max_model_len
        for name, expected in tensors(pad_decodes(batch, size)).items():
            got = found[name]
            if (
                name == "block_tables"
            ):  # as wide as the longest sequence, and behind the step's the null block
                assert not got[:, expected.shape[1] :].any()
                got = got[:, : expected.shape[1]]
            assert got.dtype == expected.dtype
            assert got.tolist() == expected.tolist()


def test_padding_rows_write_no_slot_and_read_no_block(decoder: Decoder) -> None:
    runner = ModelRunner(decoder, CONFIG, "reference")
    attention = runner._attention
    assert isinstance(attention, ReferenceAttention)
    caches = [cache.elements for cache in (*attention.key_caches, *attention.value_caches)]
    with torch.inference_mode():
        graphs = DecodeGraphs(runner._forward, Recorder(), CONFIG, CPU)
        for cache in caches:
            cache[1:] = torch.nan  # of somebody else
            cache[[3, 5]] = 0.5
        batch = decodes([2, 7, 3, 1, 4], [[3], [3, 5], [3], [5], [3]])
        batch = replace(
            batch, metadata=replace(batch.metadata, slot_mapping=torch.tensor([12, 22, 14, 20, 15]))
        )
        before = [cache.clone() for cache in caches]
        hidden = graphs(batch)
    assert hidden.shape == (5, decoder.config.hidden_size)
    assert hidden.isfinite().all()
    for cache, old in zip(caches, before, strict=True):
        same = (cache == old) | (cache.isnan() & old.isnan())
        changed = (~same.flatten(2).all(-1)).flatten().nonzero().flatten()
        assert changed.tolist() == [12, 14, 15, 20, 22]


def _on_a_card(monkeypatch: pytest.MonkeyPatch, capture: Callable[..., object]) -> None:
    """Let the CPU pass for a CUDA device."""
    build = model_runner.build_attention
    monkeypatch.setattr(
        model_runner, "build_attention", lambda name, *rest, **options: build("reference", *rest, **options)
    )
    monkeypatch.setattr(model_runner, "CudaCapture", capture)


def test_only_cuda_has_graphs_and_enforce_eager_has_none(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on_a_card(monkeypatch, lambda device: Recorder())
    assert ModelRunner(decoder, CONFIG, "cuda", enforce_eager=False).decode_graphs is not None
    assert ModelRunner(decoder, CONFIG, "cuda", enforce_eager=True).decode_graphs is None
    assert ModelRunner(decoder, CONFIG, "reference", enforce_eager=False).decode_graphs is None


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_loaded_engine_has_graphs_unless_it_is_told_otherwise(
    enforce_eager: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    def runner(*arguments: Any, **options: Any) -> ModelRunner:
        told.append(options)
        return ModelRunner(*arguments, **options)

    monkeypatch.setattr("tessera_cli.engine.engine.ModelRunner", runner)
    options: EngineOptions = {"enforce_eager": True} if enforce_eager else {}
    load_engine(tiny_model_dir, device="cpu", num_blocks=40, max_model_len=64, **options)
    assert told == [{"enforce_eager": enforce_eager}]


def test_a_capture_that_fails_says_what_to_set(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> Recorder:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    _on_a_card(monkeypatch, fail)
    with pytest.raises(RunError, match=r"cannot be captured: CUDA out of memory") as caught:
        ModelRunner(decoder, CONFIG, "cuda", enforce_eager=False)
    for way_out in ("kv_cache_memory or num_blocks", "gpu_memory_utilization", "enforce_eager"):
        assert way_out in str(caught.value.hint)
