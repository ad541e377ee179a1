"""Which data set a load of `tessera bench` is from, and what has a place in it."""

from pathlib import Path

import typer

from tessera_cli.cli import options
from tessera_cli.cli.bench_options import Dataset
from tessera_cli.cli.prompt_line import Prompt
from tessera_cli.errors import DataError, UsageError

GENERATED = (Dataset.RANDOM, Dataset.NANO)
RANDOM_ONLY = ("prefix_len", "num_prefixes", "range_ratio", "long_input_len", "vocab_size")
_ENDS_EARLY = ("stop", "stop_token_ids", "structured_output")


def choose_dataset(given: Dataset | None, prompt_file: str | None, dataset_path: Path | None) -> Dataset:
    """The data set that is named or that a file stands for."""
    by_file = {
        Dataset.PROMPTS: ("--prompt-file", prompt_file),
        Dataset.SHAREGPT: ("--dataset-path", dataset_path),
    }
    chosen = given or next((one for one, (_, file) in by_file.items() if file is not None), Dataset.RANDOM)
    for one, (option, file) in by_file.items():
        if one is chosen and file is None:
            raise UsageError(f"--dataset {chosen} needs {option}", hint="name the file")
        if one is not chosen and file is not None:
            raise UsageError(f"{option} has no place in --dataset {chosen}", hint="leave one of them out")
    return chosen


def check_places(context: typer.Context, dataset: Dataset) -> None:
    """Refuse options of another data set."""
    if dataset is Dataset.RANDOM:
        if context.params["num_prefixes"] > 1 and not context.params["prefix_len"]:
            raise UsageError("--num-prefixes without a prefix", hint="give --prefix-len")
        return
    names = [*RANDOM_ONLY, *([] if dataset in GENERATED else ["input_len"])]
    given = [f"--{one.replace('_', '-')}" for one in names if not options.is_default(context, one)]
    if given:
        raise UsageError(
            f"{', '.join(given)}: for random prompts, not for --dataset {dataset}", hint="leave them out"
        )


def check_fields(prompt: Prompt) -> None:
    """Refuse what a line asks for and the benchmark would not do.

    Raises:
        DataError: the line has a field that ends answers early or that only `generate` looks at.
    """
    given: list[str] = [name for name in _ENDS_EARLY if name in prompt.sampling]
    given += [name for name in ("priority", "cache_salt") if getattr(prompt, name)]
    if prompt.sampling.get("ignore_eos") is False:
        given.append("ignore_eos")
    if given:
        raise DataError(
            f"{prompt.source}: `{given[0]}` has no place in a benchmark",
            hint="leave it out: answers come at once and in full length",
        )
