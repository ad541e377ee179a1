"""Turn the teacher's answers to prompts.jsonl into the quick start's documents.

    python recipes/data/split.py answers.jsonl     writes train.jsonl and eval.jsonl beside this file

`answers.jsonl` is what `tessera generate --prompt-file recipes/data/prompts.jsonl -o answers.jsonl` wrote.
Every tenth prompt of each category goes to eval.jsonl, so no prompt is in both. Only answers that the teacher
ended by itself are kept: one that --max-tokens cut has no end from which a student could learn to stop.
"""

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from make_prompts import Prompt, make_prompts

HERE = Path(__file__).parent
EVAL_EVERY = 10
Record = dict[str, Any]


class AnswersError(ValueError):
    """The answers are not those of the prompts beside this file."""


def read_answers(path: Path, prompts: list[Prompt]) -> list[Record]:
    """One record a prompt, in the order of the prompts.

    Raises:
        AnswersError: a record is missing or answers another prompt.
    """
    with path.open(encoding="utf-8") as file:
        answers: list[Record] = sorted(map(json.loads, file), key=lambda answer: answer["index"])
    if len(answers) != len(prompts):
        raise AnswersError(f"{path}: {len(answers)} answers to {len(prompts)} prompts")
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer["prompt"] != prompt.text:
            raise AnswersError(f"{path}: record {answer['index']} does not answer {prompt.id}: {prompt.text}")
    return answers


def split(prompts: list[Prompt], answers: list[Record]) -> tuple[list[Record], list[Record], Counter[str]]:
    """Documents to train on, documents to evaluate on, and the number of answers dropped for each reason."""
    train: list[Record] = []
    held_out: list[Record] = []
    dropped: Counter[str] = Counter()
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer["finish_reason"] != "stop":
            dropped[f"finish_reason is {answer['finish_reason']}"] += 1
        elif not answer["text"].strip():
            dropped["empty"] += 1
        else:
            messages = [
                {"role": "user", "content": prompt.text},
                {"role": "assistant", "content": answer["text"].strip()},
            ]
            documents = held_out if prompt.number % EVAL_EVERY == 0 else train
            documents.append({"messages": messages})
    return train, held_out, dropped


def write_jsonl(path: Path, documents: list[Record]) -> None:
    """Replace `path` as a whole."""
    partial = path.with_suffix(".partial")
    lines = (json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    partial.write_text("".join(lines), encoding="utf-8")
    os.replace(partial, path)
    print(f"{path.name}: {len(documents)} documents", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write train.jsonl and eval.jsonl from the answers.")
    parser.add_argument("answers", type=Path, help="what tessera generate wrote for prompts.jsonl")
    parser.add_argument("--output-dir", type=Path, default=HERE, help="default: this script's directory")
    arguments = parser.parse_args()
    prompts = make_prompts()
    try:
        answers = read_answers(arguments.answers, prompts)
    except AnswersError as error:
        print(f"error: {error}\n\nhint: generate the answers from prompts.jsonl once more", file=sys.stderr)
        return 2
    train, held_out, dropped = split(prompts, answers)
    write_jsonl(arguments.output_dir / "train.jsonl", train)
    write_jsonl(arguments.output_dir / "eval.jsonl", held_out)
    for reason, count in sorted(dropped.items()):
        print(f"dropped: {count} answers, {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
