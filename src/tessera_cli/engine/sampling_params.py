"""How one request is sampled and when it ends."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeGuard

from tessera_cli.engine.config import require
from tessera_cli.errors import UsageError

MAX_SAMPLES = 16_384  # more than any engine runs at once
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 1e6  # of the repetition; the others are within ±2
MAX_TEMPERATURE = 1e6  # long before it every token is as likely as any other


@dataclass(frozen=True)
class StructuredOutput:
    """The form that the whole output has to have: exactly one of the fields.

    `json_schema` is a schema as an object or as JSON text, kept as text; `json_object` is any JSON object;
    `regex` has to match the whole output; `choice` lists the possible outputs; `grammar` is Lark text in
    llguidance's dialect. What they mean is checked where they are compiled.

    Raises:
        UsageError: none or several of the fields, an empty one, or a `json_schema` that is no JSON object.
    """

    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name, value in vars(self).items() if value is not None and value is not False]
        if len(given) != 1:
            raise UsageError(
                f"structured output of {' and '.join(given) or 'no form'}",
                hint="give exactly one of json_schema, json_object, regex, choice and grammar",
            )
        require("json_object", self.json_object, isinstance(self.json_object, bool), "true or false")
        for name, text in (("regex", self.regex), ("grammar", self.grammar)):
            if text is not None and not (isinstance(text, str) and text):
                raise UsageError(f"{name} is {text!r}", hint=f"{name} has to be text, not empty", param=name)
        if self.choice is not None:
            choice = _as_tuple(self.choice)
            if not choice or not all(isinstance(text, str) and text for text in choice):
                hint = "choice has to be one or more texts, none of them empty"
                raise UsageError(f"choice is {self.choice!r}", hint=hint, param="choice")
            object.__setattr__(self, "choice", choice)
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends, with vLLM's names, defaults and ranges.

    Lists are kept as tuples and `logit_bias` as a read-only copy.

    Attributes:
        temperature: 0 is greedy.
        top_p: the most likely tokens that together have this probability stay.
        top_k: so many of the most likely tokens stay; 0 is off.
        min_p: tokens at least this fraction as likely as the most likely one stay; 0 is off.
        repetition_penalty: divides positive, multiplies negative logits of tokens seen in prompt or output.
        presence_penalty: taken off the logit of each token in the output.
        frequency_penalty: taken off it once for each time that it is there.
        logit_bias: token id to what is added to its logit, within ±100.
        seed: None lets the engine draw one.
        n: samples from one prompt.
        max_tokens: output tokens of one sample, at most.
        min_tokens: output tokens before a stop token may come.
        ignore_eos: the model's end-of-sequence tokens do not end the output; `stop_token_ids` still do.
        stop: texts that end the output, which leaves them out.
        stop_token_ids: tokens that end the output beside the model's own.
        logprobs: so many of the most likely tokens are told with each output token, 0 to 20; None tells none.
        prompt_logprobs: the same for the prompt's tokens.
        prompt_logprobs_start: the first prompt position that they are told of; only what is before it can
            come from the prefix cache.
        structured_output: the form that the output has to have.

    Raises:
        UsageError: a value that means nothing, or values that contradict each other.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self._check_distribution()
        self._check_biases()
        self._check_lengths()
        self._check_outputs()
        self._check_stops()

    def _check_distribution(self) -> None:
        _require_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE, "from 0 to 1e6")
        _require_number("top_p", self.top_p, 0.0, 1.0, "greater than 0 and at most 1", above=True)
        require("top_k", self.top_k, _is_int(self.top_k, 0), "a whole number, at least 0, which is off")
        _require_number("min_p", self.min_p, 0.0, 1.0, "from 0, which is off, to 1")
        is_seed = self.seed is None or _is_int(self.seed, 0, 2**63 - 1)
        require("seed", self.seed, is_seed, "a whole number, from 0 to 2**63 - 1")

    def _check_biases(self) -> None:
        penalty = self.repetition_penalty
        _require_number(
            "repetition_penalty", penalty, 0.0, MAX_PENALTY, "greater than 0 and at most 1e6", above=True
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require_number(name, getattr(self, name), -2.0, 2.0, "from -2 to 2")
        require("logit_bias", self.logit_bias, isinstance(self.logit_bias, Mapping), "a mapping of token ids")
        for token, bias in self.logit_bias.items():
            require(
                "logit_bias", f"{{{token!r}: ...}}", _is_int(token, 0), "a mapping of token ids, at least 0"
            )
            is_bias = _is_number(bias) and -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS
            require("logit_bias", f"{{{token}: {bias!r}}}", is_bias, "from -100 to 100 for each token")
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    def _check_lengths(self) -> None:
        require("n", self.n, _is_int(self.n, 1, MAX_SAMPLES), f"a whole number, from 1 to {MAX_SAMPLES}")
        require("max_tokens", self.max_tokens, _is_int(self.max_tokens, 1), "a whole number, at least 1")
        is_min_tokens = _is_int(self.min_tokens, 0, self.max_tokens)
        require("min_tokens", self.min_tokens, is_min_tokens, f"from 0 to max_tokens={self.max_tokens}")

    def _check_outputs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(
                name, value, value is None or _is_int(value, 0, MAX_LOGPROBS), f"from 0 to {MAX_LOGPROBS}"
            )
        first = self.prompt_logprobs_start
        require("prompt_logprobs_start", first, _is_int(first, 0), "a prompt position, from 0")
        if first and self.prompt_logprobs is None:
            raise UsageError(
                f"prompt_logprobs_start is {first} and no prompt_logprobs are asked for",
                hint="ask for them with prompt_logprobs=0",
            )
        if self.structured_output is None:
            return
        is_structured = isinstance(self.structured_output, StructuredOutput)
        require("structured_output", self.structured_output, is_structured, "a StructuredOutput")
        # A complete output has nothing but its end left, and both forbid that.
        if self.ignore_eos or self.min_tokens:
            other = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise UsageError(
                f"structured_output ends where its form is complete, and {other} forbids that",
                hint=f"leave out {other}, or ask for the length in the form itself",
                param=other,
            )

    def _check_stops(self) -> None:
        require("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "true or false")
        stop = _as_tuple(self.stop)
        is_stop = stop is not None and all(isinstance(text, str) and text for text in stop)
        require("stop", repr(self.stop), is_stop, "texts, none of them empty")
        token_ids = _as_tuple(self.stop_token_ids)
        are_token_ids = token_ids is not None and all(_is_int(token, 0) for token in token_ids)
        require("stop_token_ids", self.stop_token_ids, are_token_ids, "token ids, at least 0")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", token_ids)


def check_against_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Refuse token ids that the model does not have; ids below zero are refused already.

    Raises:
        UsageError: an id of `stop_token_ids` or `logit_bias` is not below `vocab_size`.
    """
    for name, token_ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        bad = next((token for token in token_ids if token >= vocab_size), None)
        if bad is not None:
            raise UsageError(
                f"{name} has token id {bad}",
                hint=f"the model's ids go from 0 to {vocab_size - 1}",
                param=name,
            )


def _is_int(value: object, low: int, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _require_number(
    name: str, value: object, low: float, high: float, expected: str, *, above: bool = False
) -> None:
    """A number from `low` to `high`, both finite, or with `above` greater than `low`; a NaN fails."""
    is_valid = _is_number(value) and low <= value <= high and not (above and value == low)
    require(name, value, is_valid, expected)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_tuple(values: Iterable[Any]) -> tuple[Any, ...] | None:
    """A list or tuple as a tuple; None for anything else, a single text above all."""
    return tuple(values) if isinstance(values, list | tuple) else None


def _schema_text(schema: str | Mapping[str, Any]) -> str:
    hint = 'give a JSON schema, an object like {"type": "object", ...}'
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else dict(schema)
        text = json.dumps(parsed, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"json_schema is not JSON: {str(error).splitlines()[0]}", hint=hint, param="json_schema"
        ) from error
    if not isinstance(parsed, dict):
        raise UsageError(
            f"json_schema is {text[:40]}, which is not an object", hint=hint, param="json_schema"
        )
    return text
