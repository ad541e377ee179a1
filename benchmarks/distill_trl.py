"""Tessera beside TRL's GKD trainer without sampling (lmbda=0): same student, teacher, documents and steps.

python benchmarks/distill_trl.py --trl-python VENV/bin/python [--recipe FILE] [--steps 10] [KEY=VALUE ...]

Each trains in a process of its own, TRL's in the virtual environment that has it (`pip install trl`). Prints
tokens/s of the steps after the first, peak memory of the process, and the KL that each student has to the
teacher on the recipe's held-out documents, measured by Tessera. Both learn KL(teacher ‖ student) at
temperature 1.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS = (("tokens/s", "{:,.0f}"), ("peak memory, GiB", "{:.2f}"), ("held-out KL", "{:.4f}"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Tessera beside TRL's GKD trainer.")
    parser.add_argument("--trl-python", type=Path, help="the interpreter that has trl")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--side", choices=("prepare", "tessera", "trl", "measure"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.side is not None:
        SIDES[options.side](options)
        return
    if options.trl_python is None:
        parser.error("--trl-python is needed: the python of a virtual environment with trl")
    with tempfile.TemporaryDirectory() as directory:
        for side in ("prepare", "tessera", "trl", "measure"):
            python = options.trl_python if side == "trl" else sys.executable
            words = [f"--recipe={options.recipe}", f"--steps={options.steps}", *options.overrides]
            command = [str(python), __file__, f"--side={side}", f"--work={directory}", *words]
            subprocess.run(command, check=True, stdout=sys.stderr)
        told = {side: read(Path(directory) / f"{side}.json") for side in ("tessera", "trl")}
        held_out = read(Path(directory) / "measure.json")
    print(f"{'':<18}{'Tessera':>12}{'TRL GKD':>12}")
    for name, form in ROWS:
        values = [held_out[side] if name == "held-out KL" else told[side][name] for side in told]
        print(f"{name:<18}" + "".join(f"{form.format(value):>12}" for value in values))


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def tell(options: argparse.Namespace, num_tokens: int, seconds: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {"tokens/s": num_tokens / seconds, "peak memory, GiB": peak / 2**30}
    (options.work / f"{options.side}.json").write_text(json.dumps(figures), encoding="utf-8")


def load_inputs(options: argparse.Namespace) -> Any:
    """The recipe's inputs for `--steps` steps."""
    from tessera_cli.distill.inputs import read_inputs
    from tessera_cli.recipe.loader import load_recipe
    from tessera_cli.settings import Settings

    length = ["train.max_tokens=null", "train.num_epochs=null", f"train.max_steps={options.steps}"]
    fixed = ["train.lr_scheduler=constant", "train.warmup_ratio=0", "train.gradient_accumulation_steps=1"]
    recipe = load_recipe(options.recipe, [*length, *fixed, *options.overrides]).recipe
    return read_inputs(recipe, home=Settings.from_env().home, offline=True)


def prepare(options: argparse.Namespace) -> None:
    """Write the untrained student and every step's documents, as ids and a mask."""
    import torch

    from tessera_cli.distill.students.student import build_student
    from tessera_cli.models.loader import load_decoder, save_decoder

    inputs = load_inputs(options)
    teacher = load_decoder(inputs.teacher.path, dtype=torch.float32)
    (options.work / "student").mkdir()
    save_decoder(build_student(teacher, inputs.student.layers), options.work / "student", dtype=torch.float32)
    inputs.teacher.tokenizer.save(options.work / "student")
    steps = [
        [[one.token_ids.tolist(), one.supervised.tolist()] for batch in step for one in batch]
        for step in inputs.step_documents()
    ]
    train = inputs.recipe.train
    facts = {
        "teacher": str(inputs.teacher.path),
        "steps": steps,
        "learning_rate": train.learning_rate,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
    }
    (options.work / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def train_tessera(options: argparse.Namespace) -> None:
    """The recipe's own run."""
    from tessera_cli.distill.events import Event, StageStarted, TrainStep
    from tessera_cli.distill.pipeline import run_recipe
    from tessera_cli.recipe.loader import load_recipe
    from tessera_cli.settings import Settings

    length = ["train.max_tokens=null", "train.num_epochs=null", f"train.max_steps={options.steps}"]
    fixed = ["train.lr_scheduler=constant", "train.warmup_ratio=0", "train.gradient_accumulation_steps=1"]
    once = ["eval.samples=0", "eval.max_tokens=1", "export.dtype=float32"]
    steps: list[TrainStep] = []

    def listener(event: Event) -> None:
        if isinstance(event, TrainStep):
            steps.append(event)
        elif isinstance(event, StageStarted) and event.name == "report":
            # Before the report, which runs models of its own.
            seconds = sum(step.step_seconds for step in steps[1:])
            tell(options, steps[-1].tokens - steps[0].tokens, seconds)

    run_recipe(
        load_recipe(options.recipe, [*length, *fixed, *once, *options.overrides]),
        run_dir=options.work / "run",
        listener=listener,
        resume=False,
        overwrite=False,
        device="cpu",
        offline=True,
        home=Settings.from_env().home,
    )
    (options.work / "run" / "export").rename(options.work / "tessera")


def train_trl(options: argparse.Namespace) -> None:
    """TRL's trainer on the same documents, a step's in one padded batch; there is no Tessera here."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    facts = read(options.work / "facts.json")
    student = AutoModelForCausalLM.from_pretrained(options.work / "student", dtype=torch.float32)
    teacher = AutoModelForCausalLM.from_pretrained(facts["teacher"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(options.work / "student")
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(time.perf_counter())

    class Batches(GKDTrainer):
        """The steps as they were laid out, in place of a sampler and a collator."""

        def get_train_dataloader(self) -> Any:
            return [_padded(step, tokenizer.pad_token_id) for step in facts["steps"]]

    config = GKDConfig(
        output_dir=str(options.work / "trl-run"),
        max_steps=len(facts["steps"]),
        learning_rate=facts["learning_rate"],
        weight_decay=facts["weight_decay"],
        max_grad_norm=facts["max_grad_norm"],
        adam_beta2=0.95,
        lr_scheduler_type="constant",
        lmbda=0.0,
        beta=0.0,
        temperature=1.0,
        seq_kd=False,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 2
    trainer = Batches(
        model=student,
        teacher_model=teacher,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    num_tokens = sum(len(ids) for step in facts["steps"][1:] for ids, _ in step)
    tell(options, num_tokens, marks[-1] - marks[0])
    trainer.model.save_pretrained(options.work / "trl")
    tokenizer.save_pretrained(options.work / "trl")


def _padded(step: list[Any], pad: int) -> dict[str, Any]:
    """Right-padded ids, mask and labels; `prompts` is what the trainer asks for and has no use for here."""
    import torch

    width = max(len(ids) for ids, _ in step)
    ids = torch.tensor([one + [pad] * (width - len(one)) for one, _ in step])
    mask = torch.tensor([[1] * len(one) + [0] * (width - len(one)) for one, _ in step])
    labels = torch.tensor(
        [
            [token if use else -100 for token, use in zip(one, supervised, strict=True)]
            + [-100] * (width - len(one))
            for one, supervised in step
        ]
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "prompts": ids[:, :1]}


def measure(options: argparse.Namespace) -> None:
    """The KL of both students on all held-out documents."""
    import torch

    from tessera_cli.distill.evaluation.evaluate import Evaluator, held_out_batches
    from tessera_cli.models.loader import load_decoder

    inputs = load_inputs(options)
    recipe = inputs.recipe
    batches = held_out_batches(
        inputs.eval.documents,
        max_targets=recipe.eval.max_tokens,
        max_seq_len=recipe.data.max_seq_len,
        rows_per_batch=1,
    )
    evaluator = Evaluator(load_decoder(inputs.teacher.path, dtype=torch.float32), batches, chunk_tokens=256)
    figures = {
        side: evaluator.evaluate(load_decoder(options.work / side, dtype=torch.float32), step=0).kl
        for side in ("tessera", "trl")
    }
    (options.work / "measure.json").write_text(json.dumps(figures), encoding="utf-8")


SIDES = {"prepare": prepare, "tessera": train_tessera, "trl": train_trl, "measure": measure}

if __name__ == "__main__":
    main()
