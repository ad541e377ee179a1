"""Prompts in, answers out, as they end: what the engine says, in tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import RunError
from tessera_cli.recipe.sampling_section import SamplingSection

Key = TypeVar("Key")


@dataclass(frozen=True)
class AnswerRequest(Generic[Key]):
    """A prompt in tokens, and the seed of its own draws; `key` is the caller's name for it."""

    key: Key
    prompt: list[int]
    seed: int


@dataclass(frozen=True)
class AnswerTokens(Generic[Key]):
    """An answer; its last token is the one that ended it, unless it was cut ("length")."""

    request: AnswerRequest[Key]
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


def draw_answers(
    engine: Engine, requests: Iterable[AnswerRequest[Key]], sampling: SamplingSection
) -> Iterator[AnswerTokens[Key]]:
    """The answers to `requests`, as they end.

    Raises:
        RunError: the model's logits are not finite.
        CapacityError: a prompt does not fit into the engine with its longest answer.
    """
    live: dict[str, AnswerRequest[Key]] = {}
    token_ids: dict[str, list[int]] = {}
    try:
        for request in requests:
            name = str(request.key)
            live[name], token_ids[name] = request, []
            engine.add_request(name, request.prompt, _params(sampling, request.seed))
        while live:
            for output in engine.step():
                name = output.request_id
                token_ids[name].extend(output.new_token_ids)
                if output.finish_reason is None:
                    continue
                if output.error is not None:
                    raise RunError(f"answer {name} failed: {output.error}", hint="the weights have diverged")
                reason: Literal["stop", "length"] = "length" if output.finish_reason == "length" else "stop"
                yield AnswerTokens(live.pop(name), token_ids.pop(name), reason)
    finally:
        for name in live:  # any are left only after an exception, Ctrl-C included
            engine.abort(name)


def _params(sampling: SamplingSection, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        seed=seed,
    )
