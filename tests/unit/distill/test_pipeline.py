"""Whole runs of a tiny student: what they leave, and that stopping them anywhere loses nothing."""

import dataclasses
import json
import math
import os
import resource
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tessera_cli.cli.distill_views import run_lines
from tessera_cli.cli.evaluation_view import missed_gates
from tessera_cli.cli.output import to_json
from tessera_cli.distill.evaluation import evaluate
from tessera_cli.distill.evaluation.finished_run import evaluate_run
from tessera_cli.distill.events import CheckpointSaved, Evaluated, Note, StageStarted, TrainStep, event_values
from tessera_cli.distill.pipeline import run_recipe
from tessera_cli.distill.runs import run_directory, run_models
from tessera_cli.distill.runs.metrics_file import read_metrics
from tessera_cli.distill.runs.run_status import latest_unfinished, list_runs, read_run
from tessera_cli.errors import RunError, UsageError
from tessera_cli.recipe.loader import LoadedRecipe, load_recipe

NUM_STEPS = 6


def write_data(path: Path, count: int, offset: int) -> None:
    topics = ["The quick brown fox", "A small student", "Pages of keys", "The capital of France", "A robot"]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {topics[i % 5]}?"},
                {"role": "assistant", "content": f"{topics[(i + offset) % 5]} is {i}, " * (1 + i % 3)},
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def recipe_file(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe")
    write_data(path / "train.jsonl", 24, 0)
    write_data(path / "eval.jsonl", 6, 1)
    (path / "recipe.yaml").write_text(
        f"""
name: tiny
teacher: {{model: {tiny_model_dir}}}
student: {{num_hidden_layers: 2}}
data:
  train: [{{path: train.jsonl, format: messages}}]
  eval: [{{path: eval.jsonl, format: messages}}]
  max_seq_len: 160
train:
  max_steps: {NUM_STEPS}
  micro_batch_size: 1
  gradient_accumulation_steps: 2
  learning_rate: 1e-3
eval: {{every: 2, samples: 2}}
checkpoint: {{every: 4}}
""",
        encoding="utf-8",
    )
    return path / "recipe.yaml"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def run(home: Path):
    def run(recipe, run_dir, *, listener=None, resume=False, overwrite=False):
        recipe = recipe if isinstance(recipe, LoadedRecipe) else load_recipe(recipe)
        return run_recipe(
            recipe,
            run_dir=run_dir,
            listener=listener or (lambda event: None),
            resume=resume,
            overwrite=overwrite,
            device="cpu",
            offline=True,
            home=home,
        )

    return run


@pytest.fixture(scope="module")
def finished(run, recipe_file: Path, tmp_path_factory: pytest.TempPathFactory):
    """A run that nothing disturbed, and the events it told; tests only read it."""
    events: list = []
    result = run(recipe_file, tmp_path_factory.mktemp("runs") / "whole", listener=events.append)
    return result, events


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "export" / "model.safetensors")


def assert_same_weights(run_dir: Path, other: Path) -> None:
    mine, theirs = weights(run_dir), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def stop_at(condition, error=KeyboardInterrupt):
    """A listener that is cut off at the first event that meets `condition`."""

    def listener(event) -> None:
        if condition(event):
            raise error

    return listener


def test_a_run_tells_its_stages_steps_evaluations_and_checkpoints(finished):
    result, events = finished
    stages = [event.name for event in events if isinstance(event, StageStarted)]
    assert stages == ["prepare", "evaluate", "train", "export", "report"]
    steps = [event for event in events if isinstance(event, TrainStep)]
    assert [event.step for event in steps] == list(range(1, NUM_STEPS + 1))
    assert [event.step for event in events if isinstance(event, Evaluated)] == [0, 2, 4, 6]
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [4, 6]
    assert result.num_tokens == steps[-1].tokens
    assert result.end.kl < result.start.kl


def test_a_run_leaves_its_recipe_metrics_status_and_report(finished, recipe_file):
    result, events = finished
    run_dir = result.run_dir
    assert load_recipe(run_dir / "recipe.yaml").recipe == load_recipe(recipe_file).recipe
    assert json.loads((run_dir / "origins.json").read_text())["train.max_steps"] == "line 10"
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    told = [event for event in events if isinstance(event, TrainStep | Evaluated)]
    assert [{k: v for k, v in line.items() if k != "kind"} for line in lines] == [
        dataclasses.asdict(event) for event in told
    ]
    status = read_run(run_dir)
    assert (status.status, status.step, status.num_steps) == ("finished", NUM_STEPS, NUM_STEPS)
    assert status.export == run_dir / "export"
    assert status.layers == (0, 2)
    assert status.metrics["start"]["kl"] == result.start.kl
    assert status.metrics["latest"]["kl"] == result.end.kl
    report = result.report.read_text(encoding="utf-8")
    assert f"| KL to the teacher | {result.start.kl:.4f} | {result.end.kl:.4f} | 0 |" in report
    assert report.count("| teacher | student |") == 3
    assert f"<td>{result.end.kl:.4f}</td>" in (run_dir / "report.html").read_text(encoding="utf-8")
    assert f"| {result.end.kl:.4f} |" in (result.export / "README.md").read_text(encoding="utf-8")
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")
    hidden = [path for path in run_dir.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"]
    assert hidden == []


@torch.no_grad()
def test_transformers_runs_the_export_with_the_same_logits(finished):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tessera_cli.kernels.packed import PackedAttention
    from tessera_cli.models.loader import load_decoder

    export = finished[0].export
    theirs = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(export)("What is a small student?", return_tensors="pt").input_ids
    ours = load_decoder(export, dtype=torch.float32)
    positions = torch.arange(ids.shape[1])
    attend = PackedAttention([0, ids.shape[1]], ours.attention_layers).attend
    logits = ours.logits(ours(ids[0], positions, attend))
    torch.testing.assert_close(logits, theirs(ids).logits[0], rtol=1e-4, atol=1e-4)
    assert theirs.config.num_hidden_layers == 2


@pytest.mark.parametrize(
    "condition",
    [
        lambda event: isinstance(event, StageStarted) and event.name == "evaluate",
        lambda event: isinstance(event, TrainStep) and event.step == 1,
        lambda event: isinstance(event, TrainStep) and event.step == 5,
        lambda event: isinstance(event, Evaluated) and event.step == 2,
        lambda event: isinstance(event, CheckpointSaved) and event.step == 4,
        lambda event: isinstance(event, StageStarted) and event.name == "export",
        lambda event: isinstance(event, StageStarted) and event.name == "report",
    ],
    ids=["evaluate", "step 1", "step 5", "evaluated 2", "checkpoint 4", "export", "report"],
)
def test_stopped_anywhere_and_resumed_equals_undisturbed(condition, run, recipe_file, finished, tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(recipe_file, run_dir, listener=stop_at(condition))
    assert read_run(run_dir).status == "interrupted"
    events: list = []
    result = run(recipe_file, run_dir, listener=events.append, resume=True)
    assert_same_weights(run_dir, finished[0].run_dir)
    steps = [event.step for event in events if isinstance(event, TrainStep)]
    assert steps == list(range(NUM_STEPS - len(steps) + 1, NUM_STEPS + 1))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    logged = [line["step"] for line in lines if line["kind"] == "train"]
    assert logged == list(range(1, NUM_STEPS + 1))
    assert sorted(line["step"] for line in lines if line["kind"] == "eval") == [0, 2, 4, 6]
    assert (result.start, result.end) == (finished[0].start, finished[0].end)
    assert read_run(run_dir).status == "finished"


def test_an_interrupted_step_is_saved_and_not_trained_again(run, recipe_file, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(
            recipe_file,
            tmp_path / "run",
            listener=stop_at(lambda e: isinstance(e, TrainStep) and e.step == 3),
        )
    events: list = []
    run(recipe_file, tmp_path / "run", listener=events.append, resume=True)
    assert next(event.step for event in events if isinstance(event, TrainStep)) == 4


def test_a_killed_run_is_found_interrupted_and_resumes_from_its_last_checkpoint(
    run, recipe_file, finished, tmp_path
):
    def freeze(event) -> None:
        # What the disk holds when the process dies here; no process has the id 2**22 + 1 on Linux.
        if isinstance(event, TrainStep) and event.step == 5:
            shutil.copytree(tmp_path / "alive" / "run", tmp_path / "run")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(recipe_file, tmp_path / "alive" / "run", listener=freeze)
    file = tmp_path / "run" / "run.json"
    state = json.loads(file.read_text())
    assert state["status"] == "running"
    with pytest.raises(UsageError, match="being run by another process"):
        run(recipe_file, tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match="being run by another process"):
        run(recipe_file, tmp_path / "run", overwrite=True)
    file.write_text(json.dumps(state | {"process": [2**22 + 1, 0.0]}))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind": "train", "st')
    assert latest_unfinished(tmp_path, load_recipe(recipe_file)).path == tmp_path / "run"
    events: list = []
    run(recipe_file, tmp_path / "run", listener=events.append, resume=True)
    assert next(event.step for event in events if isinstance(event, TrainStep)) == 5
    assert_same_weights(tmp_path / "run", finished[0].run_dir)


def test_a_failure_is_recorded_with_its_cause_and_can_be_resumed(run, recipe_file, finished, tmp_path):
    error = RunError("the disk is full")
    with pytest.raises(RunError):
        run(recipe_file, tmp_path / "run", listener=stop_at(lambda e: isinstance(e, CheckpointSaved), error))
    status = read_run(tmp_path / "run")
    assert (status.status, status.error) == ("failed", "RunError: the disk is full")
    run(recipe_file, tmp_path / "run", resume=True)
    assert read_run(tmp_path / "run").error is None
    assert_same_weights(tmp_path / "run", finished[0].run_dir)


@pytest.mark.parametrize(
    ("file", "condition"),
    [
        ("metrics.jsonl", lambda event: isinstance(event, TrainStep) and event.step == 5),
        ("model.safetensors", lambda event: isinstance(event, StageStarted) and event.name == "export"),
        ("curve.png", lambda event: isinstance(event, StageStarted) and event.name == "report"),
    ],
)
def test_a_disk_that_is_full_is_told_and_the_run_goes_on_when_there_is_room(
    file, condition, run, recipe_file, finished, tmp_path
):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    run_dir = tmp_path / "run"

    def fill(event) -> None:
        # The limit is on the size of a file: run.json fits, what is next to grow beyond it does not.
        if condition(event):
            room = (run_dir / file).stat().st_size + 10 if (run_dir / file).exists() else 10_000
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))

    try:
        with pytest.raises(RunError, match="cannot write") as caught:
            run(recipe_file, run_dir, listener=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "--resume" in caught.value.hint
    status = read_run(run_dir)
    assert status.status == "failed"
    assert status.error.startswith("RunError: cannot write")
    assert list(run_dir.rglob(".*")) == []
    run(recipe_file, run_dir, resume=True)
    assert_same_weights(run_dir, finished[0].run_dir)


def test_a_run_may_be_written_through_a_link_and_a_place_that_can_not_be_is_told(run, recipe_file, tmp_path):
    recipe = load_recipe(recipe_file, ["train.max_steps=1"])
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    run(recipe, tmp_path / "link")
    run(recipe, tmp_path / "link", overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert read_run(tmp_path / "disk").status == "finished"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot create .*file/run: Not a directory"):
        run(recipe, tmp_path / "file" / "run")


@pytest.mark.parametrize("moment", ["recipe.yaml", "origins.json"])
def test_a_run_that_dies_while_it_is_claimed_can_be_overwritten(
    moment, run, recipe_file, tmp_path, monkeypatch
):
    recipe = load_recipe(recipe_file, ["train.max_steps=1"])
    write = run_directory.write_text

    def die(path: Path, text: str) -> None:
        if path.name == moment:
            raise SystemExit
        write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "write_text", die)
        with pytest.raises(SystemExit):
            run(recipe, tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"process": [2**22 + 1, 0.0]}))
    if moment == "recipe.yaml":
        with pytest.raises(UsageError, match="nothing to resume"):
            run(recipe, tmp_path / "run", resume=True)
    run(recipe, tmp_path / "run", overwrite=True)
    assert read_run(tmp_path / "run").status == "finished"


def test_a_process_that_died_and_was_not_reaped_runs_nothing(finished, tmp_path):
    state = json.loads((finished[0].run_dir / "run.json").read_text()) | {"status": "running"}
    process = subprocess.Popen(["sleep", "60"])
    try:
        started = psutil.Process(process.pid).create_time()
        (tmp_path / "run.json").write_text(json.dumps(state | {"process": [process.pid, started]}))
        assert read_run(tmp_path).status == "running"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert read_run(tmp_path).status == "interrupted"
    finally:
        process.kill()
        process.wait()


def test_a_directory_in_use_is_never_taken_silently(run, recipe_file, finished, tmp_path):
    with pytest.raises(UsageError, match="not empty") as caught:
        run(recipe_file, finished[0].run_dir)
    assert "--resume" in caught.value.hint
    assert "--overwrite" in caught.value.hint
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds no run"):
        run(recipe_file, tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(UsageError, match="exclude each other"):
        run(recipe_file, tmp_path, overwrite=True, resume=True)


def test_overwrite_starts_anew(run, recipe_file, finished, tmp_path):
    shutil.copytree(finished[0].run_dir, tmp_path / "run")
    shorter = load_recipe(recipe_file, ["train.max_steps=1"])
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"holds more than a run: notes\.txt"):
        run(shorter, tmp_path / "run", overwrite=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert read_run(tmp_path / "run").status == "finished"
    (tmp_path / "run" / "notes.txt").unlink()
    (tmp_path / "run" / ".run.json.tmp").touch()
    (tmp_path / "run" / ".export").mkdir()
    run(shorter, tmp_path / "run", overwrite=True)
    assert read_run(tmp_path / "run").step == 1
    assert not (tmp_path / "run" / ".export").exists()
    run(shorter, tmp_path / "run", overwrite=True)  # whatever a run leaves may be replaced


def test_nothing_to_resume_is_an_error(run, recipe_file, finished, tmp_path):
    for run_dir in (tmp_path / "none", tmp_path, finished[0].run_dir):
        with pytest.raises(UsageError, match="nothing to resume"):
            run(recipe_file, run_dir, resume=True)
    assert not (tmp_path / "none").exists()


def test_resuming_with_another_recipe_data_or_teacher_names_what_changed(run, recipe_file, tmp_path):
    moved = tmp_path / "recipe"
    shutil.copytree(recipe_file.parent, moved)
    teacher = tmp_path / "teacher"
    shutil.copytree(load_recipe(recipe_file).recipe.teacher.model, teacher)
    override = [f"teacher.model={teacher}"]
    recipe = load_recipe(moved / "recipe.yaml", override)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "run", listener=stop_at(lambda e: isinstance(e, TrainStep)))
    changed = load_recipe(moved / "recipe.yaml", [*override, "seed=1", "train.learning_rate=1e-4"])
    with pytest.raises(UsageError, match=r"the recipe changed in seed, train\.learning_rate"):
        run(changed, tmp_path / "run", resume=True)
    write_data(moved / "train.jsonl", 25, 0)
    tensors = teacher / "model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x00")
    with pytest.raises(UsageError, match=r"changed since it began: data\.train, teacher"):
        run(recipe, tmp_path / "run", resume=True)
    assert read_run(tmp_path / "run").status == "interrupted"


@pytest.mark.parametrize("line", [{"kl": 1.0, "kind": "eval"}, {"kind": "train"}, {}, []], ids=str)
def test_a_run_with_figures_of_another_version_is_not_resumed(line, run, recipe_file, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(recipe_file, tmp_path / "run", listener=stop_at(lambda e: isinstance(e, TrainStep)))
    before = (tmp_path / "run" / "run.json").read_bytes()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match=r"metrics\.jsonl is not what this version of Tessera writes"):
        run(recipe_file, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "run.json").read_bytes() == before


def test_an_infinite_perplexity_is_null_in_json_and_infinite_again_when_read(
    run, recipe_file, tmp_path, monkeypatch
):
    monkeypatch.setattr(evaluate, "_perplexity", lambda negative_log_likelihood: math.inf)
    result = run(recipe_file, tmp_path / "run")
    files = [tmp_path / "run" / name for name in ("metrics.jsonl", "run.json")]
    assert not any("Infinity" in file.read_text() for file in files)
    _, evaluations = read_metrics(files[0])
    assert [one.student_perplexity for one in evaluations] == [math.inf] * len(evaluations)
    assert to_json(result.as_dict()).count("null") == 4
    shown = [line.split() for line in run_lines(read_run(tmp_path / "run"))]
    assert ["perplexity", "inf", "inf"] in shown
    missed = missed_gates(event_values(result.end), {"max_perplexity": 1e9})
    assert missed == ["perplexity is inf, above 1e+09"]


def test_a_recipe_that_cannot_run_leaves_no_directory(run, recipe_file, tmp_path):
    for override in ("student.num_hidden_layers=4", "data.max_seq_len=513", "teacher.model=./missing"):
        with pytest.raises(UsageError):
            run(load_recipe(recipe_file, [override]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_student_of_important_layers_resumes_with_the_same_layers(run, recipe_file, tmp_path, monkeypatch):
    recipe = load_recipe(recipe_file, ["student.layers=importance"])
    with pytest.raises(KeyboardInterrupt):
        run(recipe, tmp_path / "run", listener=stop_at(lambda e: isinstance(e, TrainStep)))
    layers = read_run(tmp_path / "run").layers
    assert len(layers) == 2
    monkeypatch.setattr(run_models, "decide_start", None)
    run(recipe, tmp_path / "run", resume=True)
    assert read_run(tmp_path / "run").layers == layers


def test_a_run_is_measured_again_with_the_same_figures(finished, home):
    result, _ = finished
    events: list = []
    options = {"listener": events.append, "device": "cpu", "home": home, "offline": True}
    figures = evaluate_run(result.run_dir, limit=None, **options)
    assert dataclasses.asdict(figures.start) == pytest.approx(dataclasses.asdict(result.start))
    assert dataclasses.asdict(figures.student) == pytest.approx(dataclasses.asdict(result.end))
    assert figures.speculative.acceptance == figures.student.acceptance
    limited = evaluate_run(result.run_dir, limit=30, **options)
    assert limited.student.num_tokens <= 30
    with pytest.raises(UsageError, match="limit is 0"):
        evaluate_run(result.run_dir, limit=0, **options)


def test_runs_are_listed_by_age_and_foreign_files_passed_over(finished, recipe_file):
    root = finished[0].run_dir.parent
    (root / "foreign").mkdir()
    (root / "foreign" / "run.json").write_text("{}")
    assert [run.path for run in list_runs(root)] == [finished[0].run_dir]
    assert latest_unfinished(root, load_recipe(recipe_file)) is None
    with pytest.raises(UsageError, match="is not the state of a run"):
        read_run(root / "foreign")


def test_left_out_documents_are_told(run, recipe_file, tmp_path):
    events: list = []
    recipe = load_recipe(recipe_file, ["data.max_seq_len=64", "train.max_steps=1"])
    run(recipe, tmp_path / "run", listener=events.append)
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any("are longer than data.max_seq_len 64" in note for note in notes)
    assert notes[0] in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")


def test_held_out_documents_that_are_trained_on_are_told_by_the_run_and_its_report(
    run, recipe_file, tmp_path
):
    events: list = []
    same = f"data.eval=[{{path: {recipe_file.parent / 'train.jsonl'}, format: messages}}]"
    run(load_recipe(recipe_file, [same, "train.max_steps=1"]), tmp_path / "run", listener=events.append)
    (told,) = [event.text for event in events if isinstance(event, Note) and "as well" in event.text]
    assert told.startswith(
        "data.eval: 24 of 24 documents are in data.train as well (documents 0, 1, 2, 3, 4, …)"
    )
    assert told in (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
