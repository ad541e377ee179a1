"""`tessera quantize`: a model directory of int8 weights, and what they cost."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tessera_cli.cli import options
from tessera_cli.cli.output import Output
from tessera_cli.errors import UsageError
from tessera_cli.settings import Settings, prepare_process

if TYPE_CHECKING:
    from tessera_cli.distill.data.corpus import TrainBatch
    from tessera_cli.distill.evaluation.quantization_cost import QuantizationCost
    from tessera_cli.models.int8_checkpoint import Int8Checkpoint


class EvalFormat(StrEnum):
    """What a document looks like; the names of recipes."""

    MESSAGES = "messages"
    TEXT = "text"
    PROMPT_COMPLETION = "prompt_completion"


def quantize(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model directory, a hub id, a .gguf file or package:IMPORT_NAME/FILE.gguf.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.", show_default=False)],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a quantised model that OUT holds.")
    ] = False,
    eval_file: Annotated[
        Path | None,
        typer.Option(
            "--eval",
            metavar="FILE",
            help="Measure what int8 costs on these documents: .jsonl or .parquet, as in recipes.",
            show_default=False,
        ),
    ] = None,
    eval_format: Annotated[
        EvalFormat, typer.Option(help="What a document of --eval looks like.")
    ] = EvalFormat.MESSAGES,
    eval_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens to measure on, in whole documents.")
    ] = 4096,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Write a model's matrices in int8, which `generate`, `serve` and `bench` then run.

    \b
      tessera quantize runs/RUN/export student-int8
      tessera quantize runs/RUN/export student-int8 --eval recipes/data/eval.jsonl

    The same weights come from `--quantization int8` without a directory; one takes a quarter of the disk.
    """
    output = Output.of(json=json, quiet=quiet)
    settings = Settings.from_env()
    asks_how = not all(options.is_default(context, name) for name in ("eval_format", "eval_tokens"))
    if eval_file is None and asks_how:
        raise UsageError("--eval-format and --eval-tokens are of --eval", hint="name its FILE")
    if eval_file is not None and not eval_file.is_file():
        raise UsageError(f"no such data file: {eval_file}")
    offline = offline or settings.offline
    prepare_process(offline=offline)
    from tessera_cli.models.source import resolve_model

    source = resolve_model(model, home=settings.home, offline=offline, notify=output.note)
    from tessera_cli.models.int8_checkpoint import check_source, check_target, write_int8_checkpoint

    # What can be refused is refused before anything is computed.
    check_source(source)
    check_target(out, source, overwrite=overwrite)
    batches: list[TrainBatch] = []
    if eval_file is not None:
        from tessera_cli.distill.evaluation.quantization_cost import read_documents

        batches, notes = read_documents(source, eval_file, eval_format.value, max_tokens=eval_tokens)
        for note in notes:
            output.note(note)
    output.note(f"quantising {source}")
    checkpoint = write_int8_checkpoint(source, out, overwrite=overwrite)
    cost = None
    if batches:
        from tessera_cli.distill.evaluation.quantization_cost import quantization_cost

        output.note(f"measuring on {eval_file}")
        cost = quantization_cost(source, out, batches)
    output.document(
        {
            "model": source,
            "quantization": "int8",
            **asdict(checkpoint),
            "evaluation": None if cost is None else asdict(cost),
        }
    )
    output.rows(_rows(checkpoint, cost), header=("", "original", "int8"))
    output.note(f"wrote {out}")


def _rows(checkpoint: "Int8Checkpoint", cost: "QuantizationCost | None") -> list[tuple[str, ...]]:
    sizes = (f"{size / 1e6:,.1f} MB" for size in (checkpoint.source_bytes, checkpoint.int8_bytes))
    rows: list[tuple[str, ...]] = [("weights", *sizes)]
    if cost is not None:
        rows += [
            ("perplexity", f"{cost.float32_perplexity:.4f}", f"{cost.int8_perplexity:.4f}"),
            ("KL(float32‖int8), nats/token", "", f"{cost.kl:.5f}"),
            ("top-1 agreement", "", f"{cost.top1_agreement:.2%}"),
            ("tokens measured", "", f"{cost.num_tokens:,}"),
        ]
    return rows
