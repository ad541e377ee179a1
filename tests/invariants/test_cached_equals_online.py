"""A student of a float32 cache of hidden states is, bit for bit, the one that learns from the teacher."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tessera_cli.distill import pipeline
from tessera_cli.distill.events import Evaluated, Event, Listener, TrainStep
from tessera_cli.distill.pipeline import run_recipe
from tessera_cli.distill.runs import run_models
from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.loader import load_recipe

TOPICS = ["The quick brown fox", "A small student", "Pages of keys", "The capital of France", "A robot"]


@pytest.fixture
def recipe_file(tiny_model_dir: Path, tmp_path: Path) -> Path:
    for split, count in (("train", 24), ("eval", 5)):
        rows = [
            {"prompt": f"What is {TOPICS[i % 5]}?", "completion": f" It is {split} {i}. " * (1 + i % 3)}
            for i in range(count)
        ]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        f"""
name: tiny
teacher: {{model: {tiny_model_dir}}}
student: {{num_hidden_layers: 2}}
data:
  train: [{{path: train.jsonl, format: prompt_completion}}]
  eval: [{{path: eval.jsonl, format: prompt_completion}}]
  max_seq_len: 96
train: {{max_steps: 5, micro_batch_size: 1, gradient_accumulation_steps: 2, learning_rate: 1e-3}}
eval: {{every: 3, samples: 1}}
""",
        encoding="utf-8",
    )
    return tmp_path / "recipe.yaml"


def _run(
    recipe_file: Path,
    name: str,
    *overrides: str,
    listener: Listener = lambda event: None,
    resume: bool = False,
):
    run_dir = recipe_file.parent / name
    run_recipe(
        load_recipe(recipe_file, overrides),
        run_dir=run_dir,
        listener=listener,
        resume=resume,
        overwrite=False,
        device="cpu",
        offline=True,
        home=recipe_file.parent / "home",
    )
    return load_file(run_dir / "export" / "model.safetensors")


def _figures(events: list[Event]) -> list[dict]:
    """What steps and evaluations say, but for times and memory."""
    told = [asdict(event) for event in events if isinstance(event, TrainStep | Evaluated)]
    volatile = ("seconds", "_per_second", "utilisation", "peak_memory_bytes")
    return [{key: value for key, value in figures.items() if not key.endswith(volatile)} for figures in told]


def _assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if one[name].numpy().tobytes() != other[name].numpy().tobytes()] == []


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The models that were loaded whole. Reports, which take longest, are left out."""
    models: list[Path] = []
    plain = run_models.load_first_rows

    def load_first_rows(path: Path, num_rows: int, **kwargs: Any) -> Decoder:
        models.append(path)
        return plain(path, num_rows, **kwargs)

    monkeypatch.setattr(run_models, "load_first_rows", load_first_rows)
    monkeypatch.setattr(pipeline, "write_report", lambda *arguments, **options: None)
    return models


def test_a_float32_cache_trains_the_same_student_without_the_teachers_body(
    recipe_file: Path, loaded: list[Path]
) -> None:
    online, cached = [], []
    expected = _run(recipe_file, "online", listener=online.append)
    keys = ["teacher.cache.kind=hidden", "teacher.cache.dtype=float32"]
    _assert_same(_run(recipe_file, "first", *keys), expected)

    def stop(event: Event) -> None:
        cached.append(event)
        if isinstance(event, TrainStep) and event.step == 2:
            raise KeyboardInterrupt

    loaded.clear()
    with pytest.raises(KeyboardInterrupt):
        _run(recipe_file, "second", *keys, listener=stop)
    assert loaded == []
    _assert_same(_run(recipe_file, "second", *keys, listener=cached.append, resume=True), expected)
    assert _figures(cached) == _figures(online)


@pytest.mark.parametrize(
    "keys",
    [
        ["student.layers=importance", "loss.kind=jsd", "loss.temperature=2", "loss.ce_weight=0.5"],
        ["student.init=width", "student.layers=even", "student.intermediate_size=64"],
        ["student.init=config", "student.intermediate_size=64", "train.dtype=bfloat16"],
    ],
)
def test_whatever_the_student_and_the_loss(recipe_file: Path, keys: list[str]) -> None:
    expected = _run(recipe_file, "online", *keys)
    keys = [*keys, "teacher.cache.kind=hidden", "teacher.cache.dtype=float32"]
    _assert_same(_run(recipe_file, "cached", *keys), expected)


@pytest.mark.parametrize("kind", ["topk", "sample"])
def test_other_kinds_learn_too_and_are_measured_exactly(recipe_file: Path, kind: str) -> None:
    online, cached = [], []
    _run(recipe_file, "online", listener=online.append)
    _run(recipe_file, "cached", f"teacher.cache.kind={kind}", listener=cached.append)
    start, *_, end = (event for event in cached if isinstance(event, Evaluated))
    assert start in online
    assert end.kl < start.kl
