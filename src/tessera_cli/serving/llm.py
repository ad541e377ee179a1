"""Text in, text out: tokenises prompts, drives the engine, and turns tokens into text as they come."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Unpack

from tessera_cli.engine.engine import SequenceOutput
from tessera_cli.engine.loading import EngineOptions, load_engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.stats import EngineStats, RequestMetrics
from tessera_cli.errors import UsageError
from tessera_cli.models.source import resolve_model
from tessera_cli.models.tokenizer import Tokenizer, TokenStream
from tessera_cli.settings import Settings

Message = Mapping[str, str]


@dataclass
class CompletionOutput:
    """One continuation; `token_ids` ends with the stop token where the reason is `STOP`, `text` before it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass
class RequestOutput:
    """What became of one prompt.

    `prompt` is None for a prompt given as token ids; `error` is None unless the finish reason is `ERROR`;
    `metrics` is None for a request that the engine refused.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    error: str | None = None
    metrics: RequestMetrics | None = None


OnText = Callable[[int, str], None]
OnFinished = Callable[[RequestOutput], None]
OnStep = Callable[[EngineStats], None]


@dataclass(frozen=True)
class _Prompt:
    text: str | None
    token_ids: list[int]


@dataclass
class _Request:
    """A request on its way; `index` is its place among the prompts of the call."""

    index: int
    output: RequestOutput
    stream: TokenStream
    pieces: list[str] = field(default_factory=list)


class LLM:
    """A model with its tokenizer in an engine of its own.

    Attributes:
        engine: runs the requests; its `notes` are for the user.
        tokenizer: the model's.
    """

    def __init__(self, model: str | Path, **engine_options: Unpack[EngineOptions]) -> None:
        """Load `model`: a directory, a hub id, a `.gguf` file or `package:IMPORT_NAME/FILE.gguf`.

        Raises:
            ModelError: there is no such model, or it cannot be read.
            UsageError: an option has a value that means nothing.
            CapacityError: the engine's sizes do not fit together.
        """
        settings = Settings.from_env()
        path = resolve_model(str(model), home=settings.home, offline=settings.offline)
        self.tokenizer = Tokenizer.from_dir(path)
        self.engine = load_engine(path, **engine_options)
        self._request_numbers = count()

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_text: OnText | None = None,
        on_finished: OnFinished | None = None,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; a prompt that the engine refuses gets an output with `error`, others go on.

        Args:
            prompts: text, which the tokenizer completes with its special tokens, or token ids as they are.
            params: for all prompts, or one for each.
            on_text: told of each piece of text as it is complete, with the index of its prompt.
            on_finished: told of each output when it is whole, in the order in which they end.
            on_step: told of the engine after each of its steps.

        Returns:
            The outputs in the order of the prompts.

        Raises:
            UsageError: another number of params than of prompts, or a text alone in place of a list.
        """
        if isinstance(prompts, str):  # which is a sequence of texts, too: its characters
            raise UsageError("the prompts are one text, not a list", hint="put it into a list")
        parsed = [
            _Prompt(prompt, self.tokenizer.encode(prompt))
            if isinstance(prompt, str)
            else _Prompt(None, list(prompt))
            for prompt in prompts
        ]
        return self._run(parsed, params, on_text, on_finished, on_step)

    def chat(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_text: OnText | None = None,
        on_finished: OnFinished | None = None,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Answer every conversation through the model's chat template; otherwise like `generate`.

        Raises:
            ModelError: the model has no chat template.
            DataError: the template refuses a conversation.
            UsageError: another number of params than of conversations.
        """
        parsed = [
            _Prompt(
                self.tokenizer.render_chat(messages, add_generation_prompt=True),
                self.tokenizer.encode_chat(messages, add_generation_prompt=True),
            )
            for messages in conversations
        ]
        return self._run(parsed, params, on_text, on_finished, on_step)

    def _run(
        self,
        prompts: list[_Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        on_text: OnText | None,
        on_finished: OnFinished | None,
        on_step: OnStep | None,
    ) -> list[RequestOutput]:
        every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(every) != len(prompts):
            raise UsageError(
                f"{len(every)} sampling params for {len(prompts)} prompts", hint="give one, or one for each"
            )
        outputs: list[RequestOutput] = []
        live: dict[str, _Request] = {}
        try:
            for index, (prompt, one) in enumerate(zip(prompts, every, strict=True)):
                request = self._request(index, prompt)
                output = request.output
                outputs.append(output)
                # Known before the engine knows it, so that Ctrl-C leaves none behind.
                live[output.request_id] = request
                try:
                    self.engine.add_request(output.request_id, prompt.token_ids, one)
                except UsageError as error:  # what is wrong with one prompt stops no other
                    del live[output.request_id]
                    output.error = error.message
                    output.outputs[0].finish_reason = FinishReason.ERROR
                    if on_finished is not None:
                        on_finished(output)
            while live:
                for result in self.engine.step():
                    request = live[result.request_id]
                    _take(request, result, on_text)
                    if result.finish_reason is not None:
                        del live[result.request_id]
                        if on_finished is not None:
                            on_finished(request.output)
                if on_step is not None:
                    on_step(self.engine.stats())
        finally:
            for request_id in live:  # any are left only after an exception, Ctrl-C included
                self.engine.abort(request_id)
        return outputs

    def _request(self, index: int, prompt: _Prompt) -> _Request:
        request_id = f"request-{next(self._request_numbers)}"
        completion = CompletionOutput(index=0, text="", token_ids=[], finish_reason=None)
        output = RequestOutput(request_id, prompt.text, prompt.token_ids, [completion])
        return _Request(index, output, self.tokenizer.stream())


def _take(request: _Request, result: SequenceOutput, on_text: OnText | None) -> None:
    """Add a step's tokens to the request's output, and their text where it is complete."""
    completion = request.output.outputs[0]
    completion.token_ids += result.new_token_ids
    stopped = result.finish_reason is FinishReason.STOP
    shown = result.new_token_ids[:-1] if stopped else result.new_token_ids
    pieces = [request.stream.step(token) for token in shown]
    if result.finish_reason is not None:
        pieces.append(request.stream.finish())
        completion.finish_reason = result.finish_reason
        request.output.error = result.error
        request.output.metrics = result.metrics
    piece = "".join(pieces)
    if piece:
        request.pieces.append(piece)
        if on_text is not None:
            on_text(request.index, piece)
    if result.finish_reason is not None:
        completion.text = "".join(request.pieces)
