"""Whole runs of a tiny student with what a recipe may ask of training: what they export and tell."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tessera_cli.distill.evaluation import evaluate
from tessera_cli.distill.events import Event, Note
from tessera_cli.distill.pipeline import RunResult, run_recipe
from tessera_cli.distill.training.checkpoint import checkpoint_path
from tessera_cli.errors import RunError, UsageError
from tessera_cli.recipe.loader import load_recipe

Run = Callable[..., RunResult]


@pytest.fixture
def run(tiny_model_dir: Path, tmp_path: Path) -> Run:
    for name, count in (("train", 12), ("eval", 4)):
        rows = [{"text": f"The number {i} is followed by the number {i + 1}."} for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"""
name: tiny
teacher: {{model: {tiny_model_dir}}}
student: {{num_hidden_layers: 2}}
data:
  train: [{{path: train.jsonl, format: text}}]
  eval: [{{path: eval.jsonl, format: text}}]
  max_seq_len: 128
  train_on: all
train: {{max_steps: 4, micro_batch_size: 1, gradient_accumulation_steps: 2, learning_rate: 1e-3}}
eval: {{every: 1, samples: 0}}
checkpoint: {{every: 2, keep: 1}}
export: {{dtype: float32}}
"""
    )

    def run(
        *overrides: str, listener: Callable[[Event], None] = lambda event: None, **keys: Any
    ) -> RunResult:
        return run_recipe(
            load_recipe(recipe, overrides),
            run_dir=tmp_path / "run",
            listener=listener,
            resume=False,
            overwrite=False,
            device="cpu",
            offline=True,
            home=tmp_path / "home",
        )

    return run


def _measure(monkeypatch: pytest.MonkeyPatch, kls: dict[int, float]) -> None:
    """Let every evaluation say the KL of its step in `kls`."""
    real = evaluate.Evaluator.evaluate

    def fake(self: evaluate.Evaluator, student: Any, *, step: int, **keys: Any) -> Any:
        from dataclasses import replace

        return replace(real(self, student, step=step, **keys), kl=kls[step])

    monkeypatch.setattr(evaluate.Evaluator, "evaluate", fake)


def test_the_best_weights_are_kept_and_exported(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _measure(monkeypatch, {0: 0.5, 1: 3.0, 2: 1.0, 3: 2.0, 4: 2.0})
    result = run("export.weights=best")
    assert (result.end.step, result.num_steps) == (2, 4)
    exported = load_file(result.export / "model.safetensors")
    checkpoints = result.run_dir / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000002", "step-000004"]
    best = load_file(checkpoint_path(checkpoints, 2) / "student.safetensors")
    assert torch.equal(exported["model.norm.weight"], best["norm.weight"])


def test_a_run_stops_when_patience_is_at_an_end(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _measure(monkeypatch, {0: 9.0, 1: 1.0, 2: 1.0, 3: 2.0, 4: 0.5})
    events: list[Event] = []
    result = run("train.early_stop_patience=2", listener=events.append)
    assert (result.num_steps, result.end.step) == (3, 3)
    assert Note("stopped early: held-out KL is lowest at step 1, 2 evaluations ago") in events


def test_an_average_is_what_is_measured_and_exported(run: Run) -> None:
    result = run("train.ema_decay=0.9")
    saved = checkpoint_path(result.run_dir / "checkpoints", 4)
    average, last = (load_file(saved / f"{name}.safetensors") for name in ("average", "student"))
    exported = load_file(result.export / "model.safetensors")["model.norm.weight"]
    assert torch.equal(exported, average["norm.weight"])
    assert not torch.equal(exported, last["norm.weight"])


def test_adapters_are_merged_into_the_export_and_saved_beside_it(run: Run) -> None:
    result = run("train.lora.r=2", "train.lora.dropout=0.1")
    names = set(load_file(result.export / "model.safetensors"))
    assert not any("lora" in name for name in names)
    assert {file.name for file in (result.run_dir / "adapters").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert result.end.kl < result.start.kl


def test_a_tracker_gets_the_figures(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run("train.trackers=[tensorboard]")
    files = [*result.run_dir.rglob("events.out.tfevents.*")]
    scalars: dict[str, list[int]] = {}
    for directory in {file.parent for file in files}:
        events = EventAccumulator(str(directory)).Reload()
        scalars |= {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert scalars["train/loss"] == [1, 2, 3, 4]
    assert scalars["eval/kl"] == [0, 1, 2, 3, 4]


def test_a_run_that_diverges_names_step_documents_and_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tessera_cli.distill.training import trainer

    real = trainer.Trainer._optimise

    def poisoned(self: trainer.Trainer, batches: Any) -> Any:
        if self.step == 2:
            with torch.no_grad():
                self.parameters["norm.weight"].fill_(float("nan"))
        return real(self, batches)

    monkeypatch.setattr(trainer.Trainer, "_optimise", poisoned)
    message = (
        r"diverged at step 3: loss nan.*, on documents \d+(, \d+)* of data.train; the last checkpoint is "
    )
    with pytest.raises(RunError, match=message + r"\S+/step-000002$"):
        run()


def test_adapters_without_peft_are_refused_before_anything_is_written(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from tessera_cli.distill.training import lora

    monkeypatch.setattr(lora.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"`train.lora` needs peft"):
        run("train.lora.r=2")
    assert not (tmp_path / "run").exists()
