"""`tessera generate`: prompts in, answers out, in order."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import StrEnum
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera_cli.cli import options
from tessera_cli.cli.answers import (
    Answer,
    AnswerFormat,
    check_destination,
    cut_notes,
    render_answers,
    summarize,
    summary_line,
)
from tessera_cli.cli.live import EngineView
from tessera_cli.cli.loading import LoadedModel, load_model
from tessera_cli.cli.output import Output
from tessera_cli.cli.terminal import wants_live
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import ExitCode, RunError, UsageError
from tessera_cli.files import write_file
from tessera_cli.settings import Settings

if TYPE_CHECKING:
    from tessera_cli.cli.prompts import Messages, Prompt
    from tessera_cli.serving.llm import RequestOutput


MAX_WARNINGS = 5


class OnError(StrEnum):
    """What one failed prompt does to the others."""

    SKIP = "skip"
    FAIL = "fail"


def generate(
    model_argument: options.ModelArgument = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", "-p", metavar="TEXT", help="A prompt; repeat it for several.", show_default=False
        ),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|-",
            help=".txt: one prompt per non-empty line; .jsonl: `prompt` or `messages` per line, with "
            "max_tokens, temperature, top_p, top_k and seed of its own; -: lines of text from stdin.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", "--max-new-tokens", min=1, metavar="N", help="Most tokens of an answer."
        ),
    ] = 256,
    temperature: Annotated[
        float, typer.Option(min=0, metavar="T", help="0 always takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Sample from the likeliest tokens of this total share.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, metavar="K", help="Sample from this many likeliest tokens; 0 is off.")
    ] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end of an answer.")
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Prompt i samples with SEED + i, so equal prompts get different answers."
        ),
    ] = 0,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put prompts into the chat template, or not. [default: chat if the model has a template]",
            show_default=False,
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message of every prompt.", show_default=False)
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where answers go. [default: stdout]", show_default=False
        ),
    ] = None,
    answer_format: Annotated[
        AnswerFormat | None,
        typer.Option(
            "--format",
            help="[default: text on a terminal and for .txt, json for .json, else jsonl]",
            show_default=False,
        ),
    ] = None,
    json_output: options.JsonOption = False,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Write the answer as it comes. [default: for one prompt on a terminal]",
            show_default=False,
        ),
    ] = None,
    on_error: Annotated[
        OnError, typer.Option(help="When a prompt fails: go on, or stop everything.")
    ] = OnError.SKIP,
    live: options.LiveOption = None,
    log_interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Between lines when not redrawing in place.")
    ] = 5.0,
    quiet: options.QuietOption = False,
    model_option: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = 16,
    kv_cache_memory: options.KvCacheMemoryOption = 1 << 30,
    num_blocks: options.NumBlocksOption = None,
    max_num_seqs: options.MaxNumSeqsOption = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokensOption = 2048,
    enable_chunked_prefill: options.ChunkedPrefillOption = True,
    attention_backend: options.AttentionBackendOption = "auto",
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Answer prompts with a model.

    \b
      tessera generate runs/RUN/export -p "Why is the sky blue?"
      tessera generate --prompt-file prompts.jsonl -o answers.jsonl

    Greedy unless --temperature is given. Exit status 1 if any prompt failed. The last line on stderr counts
    prompt and answer tokens over the whole wall time; TTFT is submission to first token, queueing included.
    """
    settings = Settings.from_env()
    output = Output.of(json=json_output, quiet=quiet)
    form = _choose_format(answer_format, json_output, output_file, output)
    destination = None if output_file is None else check_destination(output_file)
    from tessera_cli.cli.prompts import check_unicode, conversations_of, read_prompts, sampling_of

    prompts = read_prompts(prompt or [], prompt_file)
    check_unicode(system or "", "--system")
    if stream and (len(prompts) > 1 or form is not AnswerFormat.TEXT or output_file is not None):
        raise UsageError("--stream writes one answer, as text, to stdout", hint="leave --stream out")
    streams = _streams(output, len(prompts), form, output_file) if stream is None else stream
    shows_live = wants_live(output.console, live, no_progress=settings.no_progress)
    base = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=max_tokens, ignore_eos=ignore_eos
    )
    params = sampling_of(prompts, base, seed)
    model = load_model(
        options.choose_model(model_argument, model_option, settings, output),
        settings,
        output,
        offline=offline,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        kv_cache_memory=kv_cache_memory,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        attention_backend=attention_backend,
    )
    conversations = conversations_of(prompts, chat, system, model.llm.tokenizer.chat_template is not None)
    view = None
    if (len(prompts) > 1 or live) and not quiet and not streams:
        view = EngineView(
            output.console,
            live=shows_live,
            title=model.title("generate"),
            num_requests=len(prompts),
            start=model.llm.engine.stats(),
            log_interval=log_interval,
        )
    on_text = (lambda _, piece: output.data(piece, end="")) if streams else None
    started = monotonic()
    with view or nullcontext():
        outputs = _run(model, prompts, conversations, params, on_error, on_text, view)
    answers = [Answer.of(index, *pair) for index, pair in enumerate(zip(prompts, outputs, strict=True))]
    summary = summarize(answers, monotonic() - started, model.peak_memory_bytes())
    if streams:
        output.data("")
    else:
        _write(answers, summary, form, destination, output)
    _tell(prompts, answers, params, output)
    output.note(summary_line(summary))
    if summary["failed"]:
        raise typer.Exit(ExitCode.FAILED)


def _choose_format(
    given: AnswerFormat | None, json_output: bool, output_file: Path | None, output: Output
) -> AnswerFormat:
    if output_file is not None:
        by_suffix = {".json": AnswerFormat.JSON, ".txt": AnswerFormat.TEXT}
        return given or by_suffix.get(output_file.suffix.lower(), AnswerFormat.JSONL)
    if json_output:
        if given not in (None, AnswerFormat.JSON):
            raise UsageError(f"--json contradicts --format {given}", hint="give one of them")
        return AnswerFormat.JSON
    return given or (AnswerFormat.TEXT if output.stdout.isatty() else AnswerFormat.JSONL)


def _streams(output: Output, num_prompts: int, form: AnswerFormat, output_file: Path | None) -> bool:
    return num_prompts == 1 and form is AnswerFormat.TEXT and output_file is None and output.stdout.isatty()


def _run(
    model: LoadedModel,
    prompts: Sequence["Prompt"],
    conversations: "list[Messages] | None",
    params: list[SamplingParams],
    on_error: OnError,
    on_text: Callable[[int, str], None] | None,
    view: EngineView | None,
) -> list["RequestOutput"]:
    def on_finished(result: "RequestOutput") -> None:
        if result.error is not None and on_error is OnError.FAIL:
            raise RunError(f"a prompt failed: {result.error}", hint="--on-error skip goes on with the others")
        if view is not None:
            view.on_finished(result.metrics if result.error is None else None)

    on_step = None if view is None else view.on_step
    if conversations is None:
        texts = [prompt.text or "" for prompt in prompts]
        return model.llm.generate(texts, params, on_text=on_text, on_finished=on_finished, on_step=on_step)
    return model.llm.chat(conversations, params, on_text=on_text, on_finished=on_finished, on_step=on_step)


def _write(
    answers: Sequence[Answer], summary: dict[str, Any], form: AnswerFormat, path: Path | None, output: Output
) -> None:
    text = render_answers(answers, summary, form)
    if path is None:
        output.stdout.write(text)
        output.stdout.flush()
        return
    write_file(path, text)
    output.document({"output": str(path), "summary": summary})
    output.note(f"wrote {path}")


def _tell(
    prompts: Sequence["Prompt"], answers: Sequence[Answer], params: Sequence[SamplingParams], output: Output
) -> None:
    failed = [pair for pair in zip(prompts, answers, strict=True) if pair[1].error is not None]
    for prompt, answer in failed[:MAX_WARNINGS]:
        output.warning(f"{prompt.source} failed: {answer.error}")
    if len(failed) > MAX_WARNINGS:
        output.warning(f"{len(failed) - MAX_WARNINGS} more prompts failed; their records have `error`")
    for line in cut_notes(answers, [one.max_tokens for one in params]):
        output.note(f"note: {line}")
