"""Text in, text out: tokenises prompts, drives the engine, and hands out text as it comes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TypedDict, TypeVar, Unpack

from tessera_cli.engine.engine import SequenceOutput
from tessera_cli.engine.loading import EngineOptions, load_engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.stats import EngineStats
from tessera_cli.errors import UsageError
from tessera_cli.models.source import resolve_model
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.serving.outputs import Logprob, RequestOutput
from tessera_cli.serving.text_stream import TextStream
from tessera_cli.serving.token_bytes import TokenBytes
from tessera_cli.settings import Settings

Message = Mapping[str, str]
OnText = Callable[[int, int, str], None]
OnFinished = Callable[[RequestOutput], None]
OnStep = Callable[[EngineStats], None]
T = TypeVar("T")


class RunOptions(TypedDict, total=False):
    """What `generate` and `chat` take beside prompts and sampling.

    Attributes:
        priority: for all prompts, or a list with one for each; a lower number runs sooner.
        cache_salt: for all prompts, or a list with one for each; prompts share cached prefixes only with
            prompts of the same salt.
        on_text: told of each piece of text as it is complete, with the index of its prompt and its own index
            among the prompt's continuations.
        on_finished: told of each output when it is whole, in the order in which they end.
        on_step: told of the engine after each of its steps.
    """

    priority: int | list[int]
    cache_salt: str | list[str | None] | None
    on_text: OnText | None
    on_finished: OnFinished | None
    on_step: OnStep | None


@dataclass(frozen=True)
class _Prompt:
    text: str | None
    token_ids: list[int]


@dataclass
class _Request:
    """A request on its way; `index` is its place among the prompts of the call."""

    index: int
    output: RequestOutput
    streams: list[TextStream]

    @property
    def is_over(self) -> bool:
        return all(stream.output.finish_reason is not None for stream in self.streams)


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
        self._path = resolve_model(str(model), home=settings.home, offline=settings.offline)
        self.tokenizer = Tokenizer.from_dir(self._path)
        self.engine = load_engine(self._path, **engine_options)
        self._eos_token_ids = frozenset(self.engine.model_config.eos_token_ids)
        self._request_numbers = count()

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams],
        **options: Unpack[RunOptions],
    ) -> list[RequestOutput]:
        """Continue every prompt; a prompt that the engine refuses gets outputs with `error`, others go on.

        Args:
            prompts: text, which the tokenizer completes with its special tokens, or token ids as they are.
            params: for all prompts, or one for each.
            options: see `RunOptions`.

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
        return self._run(parsed, params, options)

    def chat(
        self,
        conversations: Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams],
        **options: Unpack[RunOptions],
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
        return self._run(parsed, params, options)

    def check(self, params: SamplingParams) -> None:
        """Refuse, before any work, what the engine could do for no prompt.

        Raises:
            UsageError: token ids outside the vocabulary, or a structured output that cannot be compiled.
            CapacityError: more samples than can run at once.
        """
        request_id = f"request-{next(self._request_numbers)}"
        self.engine.add_request(request_id, [0], replace(params, max_tokens=max(1, params.min_tokens)))
        self.engine.abort(request_id)

    def _run(
        self, prompts: list[_Prompt], params: SamplingParams | Sequence[SamplingParams], options: RunOptions
    ) -> list[RequestOutput]:
        every = _for_each(params if isinstance(params, SamplingParams) else list(params), prompts, "params")
        priorities = _for_each(options.get("priority", 0), prompts, "priority")
        salts = _for_each(options.get("cache_salt"), prompts, "cache_salt")
        on_finished, on_step = options.get("on_finished"), options.get("on_step")
        outputs: list[RequestOutput] = []
        live: dict[str, _Request] = {}
        try:
            for index, (prompt, one) in enumerate(zip(prompts, every, strict=True)):
                request = self._request(index, prompt, one)
                request_id = request.output.request_id
                outputs.append(request.output)
                # Known before the engine knows it, so that Ctrl-C leaves none behind.
                live[request_id] = request
                try:
                    self.engine.add_request(
                        request_id, prompt.token_ids, one, priority=priorities[index], cache_salt=salts[index]
                    )
                except UsageError as error:  # what is wrong with one prompt stops no other
                    del live[request_id]
                    for stream in request.streams:
                        stream.refuse(error.message)
                    if on_finished is not None:
                        on_finished(request.output)
            while live:
                for result in self.engine.step():
                    request = live[result.request_id]
                    self._take(request, result, options.get("on_text"))
                    if request.is_over:
                        del live[result.request_id]
                        if on_finished is not None:
                            on_finished(request.output)
                if on_step is not None:
                    on_step(self.engine.stats())
        finally:
            for request_id in live:  # any are left only after an exception, Ctrl-C included
                self.engine.abort(request_id)
        return outputs

    def _request(self, index: int, prompt: _Prompt, params: SamplingParams) -> _Request:
        arrival_time = time.monotonic()
        streams = [
            TextStream(
                sample,
                params,
                self.tokenizer.stream(),
                eos_token_ids=self._eos_token_ids,
                token_bytes=self._token_bytes,
                arrival_time=arrival_time,
            )
            for sample in range(params.n)
        ]
        request_id = f"request-{next(self._request_numbers)}"
        completions = [stream.output for stream in streams]
        return _Request(index, RequestOutput(request_id, prompt.text, prompt.token_ids, completions), streams)

    def _take(self, request: _Request, result: SequenceOutput, on_text: OnText | None) -> None:
        """Add a step's tokens to the request's output, and end it in the engine where a stop string came."""
        stream = request.streams[result.index]
        piece = stream.take(result)
        if stream.output.finish_reason is not None and result.finish_reason is None:
            self.engine.finish(result.request_id, result.index)
        if result.prompt_logprobs is not None:
            request.output.prompt_logprobs = [
                None if row is None else Logprob.of(row, self._token_bytes) for row in result.prompt_logprobs
            ]
        if piece and on_text is not None:
            on_text(request.index, result.index, piece)

    def _token_bytes(self, token_id: int) -> bytes:
        return self._bytes_of_tokens(token_id)

    @cached_property
    def _bytes_of_tokens(self) -> TokenBytes:
        return TokenBytes.from_dir(self._path)


def _for_each(value: T | list[T], prompts: Sequence[_Prompt], name: str) -> list[T]:
    """`value` for each of the prompts; a list has to have as many.

    Raises:
        UsageError: it has another number.
    """
    if not isinstance(value, list):
        return [value] * len(prompts)
    if len(value) != len(prompts):
        what = "sampling params" if name == "params" else f"values of {name}"
        raise UsageError(f"{len(value)} {what} for {len(prompts)} prompts", hint="give one, or one for each")
    return value
