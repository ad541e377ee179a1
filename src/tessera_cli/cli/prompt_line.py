"""One prompt and what goes with it, and how a line of a .jsonl prompt file is read: strictly."""

import json
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tessera_cli.cli.sampling_options import FORMS, structured_output
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import DataError, UsageError

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """What to answer: `text` or `messages`, never both.

    `sampling` holds the line's own sampling fields, which win over the command line's. `source` names the
    prompt in errors. A lower `priority` runs sooner; prompts share cached prefixes within a `cache_salt`.
    """

    text: str | None
    messages: Messages | None
    sampling: dict[str, Any]
    source: str
    priority: int = 0
    cache_salt: str | None = None

    def params(self, base: SamplingParams) -> SamplingParams:
        """`base` with the prompt's own fields.

        Raises:
            DataError: they contradict it, such as `min_tokens` above the command line's --max-tokens.
        """
        try:
            return replace(base, **self.sampling)
        except UsageError as error:
            raise DataError(f"{self.source}: {error.message}", hint=error.hint) from error


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "user", "assistant"]
    content: str


class _PromptLine(BaseModel):
    """One line of a .jsonl prompt file: what to answer, and sampling fields that hold for this line only."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    prompt: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[_Message], Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]*)$")], float] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    logprobs: Annotated[int, Field(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None

    def sampling(self) -> dict[str, Any]:
        """The fields of `SamplingParams` that the line sets.

        Raises:
            UsageError: forms of structured output contradict each other, or mean nothing.
        """
        given = self.model_dump(exclude={"prompt", "messages", "priority", "cache_salt"}, exclude_none=True)
        form = structured_output({name: given.pop(name) for name in FORMS if name in given})
        if form is not None:
            given["structured_output"] = form
        if "logit_bias" in given:
            given["logit_bias"] = {int(token_id): bias for token_id, bias in given["logit_bias"].items()}
        if isinstance(given.get("stop"), str):
            given["stop"] = [given["stop"]]
        return given


def parse_line(line: str, source: str) -> Prompt:
    """The prompt of one line; `source` names the line in errors.

    Raises:
        DataError: it is no JSON object, has a key or value that means nothing, or not one prompt.
    """
    try:
        fields = json.loads(line, object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source}: not a JSON object: {error}", hint="write one object per line") from error
    if not isinstance(fields, dict):
        raise DataError(f"{source}: not a JSON object", hint='write one object per line: {"prompt": "..."}')
    # In whichever field it stands, half a character goes through no tokenizer and no grammar.
    if not _is_unicode(json.dumps(fields, ensure_ascii=False)):
        raise DataError(f"{source}: not Unicode text", hint=r"write \uD800 to \uDFFF in pairs")
    try:
        parsed = _PromptLine.model_validate(fields)
        sampling = parsed.sampling()
    except ValidationError as error:
        raise DataError(f"{source}: {_problem(error)}", hint=_hint(error)) from error
    except UsageError as error:
        raise DataError(f"{source}: {error.message}", hint=error.hint) from error
    if (parsed.prompt is None) == (parsed.messages is None):
        raise DataError(f"{source}: needs either `prompt` or `messages`", hint="give exactly one of them")
    messages = None if parsed.messages is None else [message.model_dump() for message in parsed.messages]
    return Prompt(parsed.prompt, messages, sampling, source, parsed.priority or 0, parsed.cache_salt)


def check_unicode(text: str, source: str) -> None:
    """See that `text` is whole characters: stray bytes of the shell and halves of pairs in JSON are not.

    Raises:
        DataError: it is not, and no tokenizer would take it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        where = f"at character {error.start + 1}"
        raise DataError(f"{source}: not Unicode text, {where}", hint="give UTF-8 text") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"`{next(key for key in keys if keys.count(key) > 1)}` is given twice")
    return fields


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key `{where}`"
    return f"`{where}`: {first['msg'][0].lower()}{first['msg'][1:]}"


def _hint(error: ValidationError) -> str | None:
    is_unknown = error.errors(include_url=False)[0]["type"] == "extra_forbidden"
    return f"known keys: {', '.join(_PromptLine.model_fields)}" if is_unknown else None
