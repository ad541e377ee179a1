"""A recipe gives the same student, and the same files, however many processes train it."""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RECIPE = """
name: tiny
teacher: {{model: {teacher}}}
student: {{num_hidden_layers: 2}}
data:
  train: [{{path: train.jsonl, format: messages}}]
  eval: [{{path: eval.jsonl, format: messages}}]
  max_seq_len: 160
train:
  max_steps: 4
  micro_batch_size: 1
  gradient_accumulation_steps: 4
  learning_rate: 1e-3
  ema_decay: 0.5
eval: {{every: 2, samples: 1}}
checkpoint: {{every: 2, keep: 3}}
"""


# The command, in which every process compares its weights with all others' after each step.
COMPARING = """
import sys
import torch
from tessera_cli.cli.app import main
from tessera_cli.distill.training.trainer import Trainer

train_step = Trainer.train_step

def compared(trainer, batches):
    figures = train_step(trainer, batches)
    weights = [parameter.detach() for parameter in trainer.parameters.values()]
    for theirs in trainer._processes.gather(weights):
        assert all(map(torch.equal, weights, theirs)), "weights differ"
    if trainer._processes.is_main:
        print("the same weights in", trainer._processes.count, file=sys.stderr)
    return figures

Trainer.train_step = compared
main()
"""


def _write_rows(path: Path, count: int) -> None:
    rows = (
        {
            "messages": [
                {"role": "user", "content": f"What is {i}?"},
                {"role": "assistant", "content": f"A number, {i} " * (1 + i % 3)},
            ]
        }
        for i in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def recipe(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recipe")
    # 15 rows: the last micro-batch of each epoch begins in one and ends in the next.
    _write_rows(directory / "train.jsonl", 15)
    _write_rows(directory / "eval.jsonl", 4)
    path = directory / "recipe.yaml"
    path.write_text(RECIPE.format(teacher=tiny_model_dir), encoding="utf-8")
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _launch(
    recipe: Path,
    run_dir: Path,
    *arguments: str,
    processes: int,
    how: str = "--multi_gpu",
    program: Sequence[str] = ("-m", "tessera_cli"),
) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable]
    if processes > 1:
        # --multi_gpu is accelerate's name for its own launcher; with --cpu it starts one process.
        launcher += ["-m", "accelerate.commands.launch", how, "--num_processes", str(processes)]
        launcher += ["--main_process_port", str(_free_port()), "--num_machines", "1"]
        launcher += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [*program, "distill", "run", str(recipe), *arguments, "-o", str(run_dir)]
    return subprocess.run(
        [*launcher, *command, "--device", "cpu"], capture_output=True, text=True, timeout=400, check=False
    )


def _finished(
    recipe: Path, run_dir: Path, *arguments: str, processes: int, **how: Any
) -> subprocess.CompletedProcess[str]:
    done = _launch(recipe, run_dir, *arguments, processes=processes, **how)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def alone(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    _finished(recipe, run_dir, processes=1)
    return run_dir


def _checkpoints(run_dir: Path) -> dict[str, Tensor]:
    return {
        f"{file.parent.name}/{file.name}/{name}": tensor
        for file in sorted(run_dir.glob("checkpoints/*/*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _records(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("data_parallel", ["ddp", "fsdp2"])
def test_two_processes_write_the_run_of_one(
    recipe: Path, alone: Path, tmp_path: Path, data_parallel: str
) -> None:
    run_dir = tmp_path / "run"
    done = _finished(recipe, run_dir, f"train.data_parallel={data_parallel}", "--json", processes=2)
    assert json.loads(done.stdout)["status"] == "finished"
    expected, found = _checkpoints(alone), _checkpoints(run_dir)
    assert found.keys() == expected.keys()
    assert any("average" in name for name in found)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-6, msg=name)
    assert any(not torch.equal(found[name], tensor) for name, tensor in expected.items()), "one process ran"
    one, two = _records(alone), _records(run_dir)
    assert [(r["kind"], r["step"], r.get("supervised_tokens")) for r in two] == [
        (r["kind"], r["step"], r.get("supervised_tokens")) for r in one
    ]
    assert [r["kl"] for r in two if r["kind"] == "eval"] == pytest.approx(
        [r["kl"] for r in one if r["kind"] == "eval"], rel=1e-4
    )
    exported = [load_file(path / "export" / "model.safetensors") for path in (alone, run_dir)]
    assert exported[0].keys() == exported[1].keys()


@pytest.mark.parametrize("lora", [(), ("train.lora.r=2",)])
def test_two_processes_answer_as_one(recipe: Path, tmp_path: Path, lora: tuple[str, ...]) -> None:
    if lora:
        pytest.importorskip("peft")
    overrides = (
        *lora,
        "data.on_policy={fraction: 0.7, every: 2, max_tokens: 12, max_num_seqs: 3}",
        "train.ema_decay=null",
    )
    alone, together = tmp_path / "alone", tmp_path / "together"
    _finished(recipe, alone, *overrides, processes=1)
    script = tmp_path / "comparing.py"
    script.write_text(COMPARING, encoding="utf-8")
    done = _finished(recipe, together, *overrides, processes=2, program=(str(script),))
    assert done.stderr.count("the same weights in 2") == 4
    answers = [(run_dir / "on_policy.jsonl").read_text(encoding="utf-8") for run_dir in (alone, together)]
    assert answers[0]
    assert answers[0] == answers[1]
    expected, found = _checkpoints(alone), _checkpoints(together)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-6, msg=name)


def test_a_run_goes_on_with_another_number_of_processes(recipe: Path, alone: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    _finished(recipe, run_dir, processes=2)
    status = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps(status | {"status": "interrupted"}))
    last = run_dir / "checkpoints" / "step-000004"
    (last / "state.json").unlink()
    _finished(recipe, run_dir, "--resume", processes=1)
    expected, found = _checkpoints(alone), _checkpoints(run_dir)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-6, msg=name)


def test_what_they_can_not_share_is_told_once_before_anything_is_written(
    recipe: Path, tmp_path: Path
) -> None:
    done = _launch(recipe, tmp_path / "run", "train.gradient_accumulation_steps=3", processes=2)
    assert done.returncode != 0
    assert done.stderr.count("2 processes can not share the 3 micro-batches of a step") == 1
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()


def test_one_process_where_several_were_asked_for_is_refused(recipe: Path, tmp_path: Path) -> None:
    done = _launch(recipe, tmp_path / "run", processes=2, how="--cpu")
    assert done.returncode != 0
    assert "error: accelerate was asked for several processes and has started only this one" in done.stderr
    assert not (tmp_path / "run").exists()


def test_what_ends_all_of_them_is_told_once(recipe: Path, tmp_path: Path) -> None:
    done = _launch(recipe, tmp_path / "run", "train.learning_rate=1e30", "--json", processes=2)
    assert done.returncode != 0
    assert json.loads(done.stdout)["error"]["type"] == "DivergedError"
    assert done.stderr.count("error: diverged at step") == 1
