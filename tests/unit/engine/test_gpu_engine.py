"""The engine's part of `make gpu-check`, run dry: on a CPU, where nothing is captured."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import gpu_check, gpu_engine
from torch import Tensor

from tessera_cli.engine.batch import Batch
from tessera_cli.engine.decode_graphs import DecodeGraphs
from tessera_cli.models.decoder import Decoder

TINY = replace(
    gpu_engine.SMOLLM2,
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


@pytest.fixture(autouse=True)
def _few_of_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engine, "REPEATS", 2)
    monkeypatch.setattr(gpu_engine, "NUM_REQUESTS", 12)


def test_equal_tokens_are_no_failure() -> None:
    assert gpu_engine.check_tokens(TINY, "cpu") == []


def test_a_step_that_goes_wrong_only_when_padded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph that reads what was there at its capture would."""
    replay = DecodeGraphs.__call__

    def stale(self: DecodeGraphs, batch: Batch) -> Tensor:
        return replay(self, replace(batch, input_ids=torch.zeros_like(batch.input_ids)))

    monkeypatch.setattr(DecodeGraphs, "__call__", stale)
    failures = gpu_engine.check_tokens(TINY, "cpu")
    assert failures
    assert all("against padded steps in bfloat16: request" in failure for failure in failures)


def test_every_step_is_measured_by_every_implementation(capsys: pytest.CaptureFixture[str]) -> None:
    decoder = gpu_engine.make_decoder(TINY, torch.bfloat16, "cpu")
    compiled = []

    def compile(function: object, *, dynamic: bool) -> object:
        compiled.append(function)
        return function

    steps = list(gpu_engine.measure("tiny", decoder, context=20, prefill=48, compile=compile))
    for batch in gpu_engine.BATCHES:
        kinds = [step.implementation for step in steps if step.step == f"decode {batch} x 20"]
        assert kinds == ["eager", "padded", "graphs", "schedule + commit"]
    kinds = [step.implementation for step in steps if step.step == "prefill 48"]
    assert kinds == ["eager", "compiled prefill"]
    assert len(compiled) == TINY.num_hidden_layers
    assert all(step.milliseconds > 0 for step in steps)
    gpu_engine.print_table(steps)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(steps)
    assert lines[-1].split()[-1] == f"{steps[-1].milliseconds:.3f}"


def test_what_cannot_be_measured_is_a_failure_and_what_was_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = gpu_engine.measure

    def limited(name: str, decoder: Decoder) -> Iterator[gpu_engine.StepTime]:
        yield from measure(name, decoder, context=20, prefill=48, compile=refuse)

    def refuse(function: object, *, dynamic: bool) -> object:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(gpu_engine, "BATCHES", (1,))
    monkeypatch.setattr(gpu_engine, "MODELS", {"tiny": TINY})
    monkeypatch.setattr(gpu_engine, "measure", limited)
    failures: list[str] = []
    steps = gpu_engine.measure_models("cpu", failures)
    assert failures == ["tiny, after prefill 48: no compiler"]
    assert (steps[-1].step, steps[-1].implementation) == ("prefill 48", "eager")


@pytest.mark.parametrize("failures", [[], ["decode graphs: request 3"]], ids=["right", "wrong"])
def test_the_whole_check_tells_of_the_engine(
    failures: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With everything that only a card can answer put in by hand."""
    target = tmp_path / "gpu-check.json"
    step = gpu_engine.StepTime("tiny", "decode 1 x 20", "graphs", 0.5)
    card = SimpleNamespace(name="a card", major=9, minor=0)
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--output", str(target)])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for name, answer in (("find_obstacle", None), ("check_with_sanitizer", {}), ("measure_all", [])):
        monkeypatch.setattr(gpu_check, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(gpu_check, "check_parity", lambda *, few: [])
    for name in ("measure_copy", "measure_product"):
        monkeypatch.setattr(gpu_check, name, lambda: 1.0)
    monkeypatch.setattr(gpu_engine, "check_tokens", lambda config, device: failures)
    monkeypatch.setattr(gpu_engine, "measure_models", lambda device, failures: [step])
    assert gpu_check.main() == bool(failures)
    written = json.loads(target.read_text())
    assert written["failures"] == failures
    assert written["engine_steps"] == [vars(step)]
