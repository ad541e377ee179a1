"""`tessera generate`: prompts in, answers out, in order."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tessera_cli.cli import options, sampling_options, server_options
from tessera_cli.cli.answer_output import choose_format, shown, tell_failures, write_answers
from tessera_cli.cli.answers import AnswerFormat, check_destination, summary_line
from tessera_cli.cli.loading import load_model, tracing
from tessera_cli.cli.output import Output
from tessera_cli.cli.terminal import wants_live
from tessera_cli.errors import ExitCode, UsageError
from tessera_cli.settings import Settings


class OnError(StrEnum):
    """What one failed prompt does to the others."""

    SKIP = "skip"
    FAIL = "fail"


def generate(
    context: typer.Context,
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
            "sampling fields, `priority` and `cache_salt` of its own; -: lines of text from stdin.",
            show_default=False,
        ),
    ] = None,
    max_tokens: sampling_options.MaxTokensOption = 256,
    temperature: sampling_options.TemperatureOption = 0.0,
    top_p: sampling_options.TopPOption = 1.0,
    top_k: sampling_options.TopKOption = 0,
    min_p: sampling_options.MinPOption = 0.0,
    repetition_penalty: sampling_options.RepetitionPenaltyOption = 1.0,
    presence_penalty: sampling_options.PresencePenaltyOption = 0.0,
    frequency_penalty: sampling_options.FrequencyPenaltyOption = 0.0,
    logit_bias: sampling_options.LogitBiasOption = None,
    seed: sampling_options.SeedOption = 0,
    n: sampling_options.NOption = 1,
    min_tokens: sampling_options.MinTokensOption = 0,
    ignore_eos: sampling_options.IgnoreEosOption = False,
    stop: sampling_options.StopOption = None,
    stop_token_id: sampling_options.StopTokenIdOption = None,
    logprobs: sampling_options.LogprobsOption = None,
    prompt_logprobs: sampling_options.PromptLogprobsOption = None,
    json_schema: sampling_options.JsonSchemaOption = None,
    regex: sampling_options.RegexOption = None,
    choice: sampling_options.ChoiceOption = None,
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
            help="Write the answer as it comes. [default: for one answer on a terminal]",
            show_default=False,
        ),
    ] = None,
    on_error: Annotated[
        OnError, typer.Option(help="When a prompt fails: go on, or stop everything.")
    ] = OnError.SKIP,
    base_url: server_options.BaseUrlOption = None,
    api_key: server_options.ApiKeyOption = None,
    live: options.LiveOption = None,
    log_interval: options.LogIntervalOption = 5.0,
    quiet: options.QuietOption = False,
    model_option: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    quantization: options.QuantizationOption = "auto",
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = 16,
    kv_cache_dtype: options.KvCacheDtypeOption = "auto",
    kv_cache_memory: options.KvCacheMemoryOption = None,
    gpu_memory_utilization: options.GpuMemoryUtilizationOption = 0.9,
    num_blocks: options.NumBlocksOption = None,
    max_num_seqs: options.MaxNumSeqsOption = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokensOption = 2048,
    enable_chunked_prefill: options.ChunkedPrefillOption = True,
    enable_prefix_caching: options.PrefixCachingOption = True,
    scheduling_policy: options.SchedulingPolicyOption = "fcfs",
    attention_backend: options.AttentionBackendOption = "auto",
    enforce_eager: options.EnforceEagerOption = False,
    trace: options.TraceOption = None,
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Answer prompts with a model.

    \b
      tessera generate runs/RUN/export -p "Why is the sky blue?"
      tessera generate --prompt-file prompts.jsonl -o answers.jsonl
      tessera generate --base-url http://127.0.0.1:8000 -p "Why is the sky blue?"

    Greedy unless --temperature is given. Exit status 1 if any prompt failed. The last line on stderr counts
    prompt and answer tokens over the whole wall time; TTFT is submission to first token, queueing included.
    """
    settings = Settings.from_env()
    output = Output.of(json=json_output, quiet=quiet)
    server_options.refuse_engine_options(context, base_url, "prompt_logprobs", "regex", "choice")
    form = choose_format(answer_format, json_output, output_file, output)
    destination = None if output_file is None else check_destination(output_file, others=[prompt_file])
    trace_file = None if trace is None else check_destination(trace, others=[prompt_file, output_file])
    from tessera_cli.cli.answering import Answering
    from tessera_cli.cli.prompts import check_priorities, read_prompts, sampling_of

    prompts = read_prompts(prompt or [], prompt_file)
    _check_texts(system=[system], stop=stop, json_schema=[json_schema], regex=[regex], choice=choice)
    params = sampling_of(prompts, sampling_options.sampling_params(context), seed)
    if base_url is None:
        check_priorities(prompts, scheduling_policy)
    is_one = len(prompts) == 1 and params[0].n == 1
    can_stream = is_one and form is AnswerFormat.TEXT and output_file is None
    if stream and not can_stream:
        hint = (
            "add --format text"
            if is_one and output_file is None and not json_output
            else "leave --stream out"
        )
        raise UsageError("--stream writes one answer, as text, to stdout", hint=hint)
    streams = can_stream and output.stdout.isatty() if stream is None else stream
    shows_live = wants_live(output.console, live, no_progress=settings.no_progress)
    answering = Answering(
        prompts,
        params,
        output,
        shows_progress=(len(prompts) > 1 or bool(live)) and not quiet and not streams,
        live=shows_live,
        log_interval=log_interval,
        fails_fast=on_error is OnError.FAIL,
        on_text=(lambda piece: output.data(shown(piece, output), end="")) if streams else None,
    )
    if base_url is not None:
        server = server_options.find_server(base_url, model_argument, model_option, api_key, settings)
        answers, summary = answering.by_server(server, chat, system)
    else:
        model = load_model(
            options.choose_model(model_argument, model_option, settings, output),
            settings,
            output,
            offline=offline,
            engine=options.engine_options(context),
        )
        with tracing(model, trace_file):
            answers, summary = answering.by_engine(model, chat, system)
    if streams:
        output.data("")
    else:
        write_answers(answers, summary, form, destination, output)
    tell_failures(prompts, answers, params, output)
    output.note(summary_line(summary))
    if summary["failed"]:
        raise typer.Exit(ExitCode.FAILED)


def _check_texts(**given: Sequence[str | None] | None) -> None:
    """Refuse, with a DataError, stray bytes of the shell in the values of these options."""
    from tessera_cli.cli.prompt_line import check_unicode

    for name, texts in given.items():
        for text in texts or ():
            check_unicode(text or "", f"--{name.replace('_', '-')}")
