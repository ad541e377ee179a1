"""How answers are sampled and when they end, on the command line; the names are those of `SamplingParams`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tessera_cli.engine.sampling_params import SamplingParams, StructuredOutput
from tessera_cli.errors import DataError, UsageError

MaxTokensOption = Annotated[
    int,
    typer.Option("--max-tokens", "--max-new-tokens", metavar="N", help="Most tokens of an answer."),
]
TemperatureOption = Annotated[float, typer.Option(metavar="T", help="0 always takes the likeliest token.")]
TopPOption = Annotated[
    float, typer.Option(metavar="P", help="Sample from the likeliest tokens of this total share.")
]
TopKOption = Annotated[
    int, typer.Option(metavar="K", help="Sample from this many likeliest tokens; 0 is off.")
]
MinPOption = Annotated[
    float,
    typer.Option(metavar="P", help="Sample from tokens at least P times as likely as the likeliest."),
]
RepetitionPenaltyOption = Annotated[
    float, typer.Option(metavar="X", help="Above 1, tokens of prompt and answer get less likely.")
]
PresencePenaltyOption = Annotated[
    float, typer.Option(metavar="X", help="Taken off the logit of each token of the answer.")
]
FrequencyPenaltyOption = Annotated[
    float, typer.Option(metavar="X", help="Taken off it for each time that it came.")
]
LogitBiasOption = Annotated[
    list[str] | None,
    typer.Option(metavar="ID=X", help="Add X to the logit of token ID; repeatable.", show_default=False),
]
SeedOption = Annotated[
    int,
    typer.Option(metavar="N", help="Prompt i samples with SEED + i, so equal prompts get different answers."),
]
NOption = Annotated[
    int, typer.Option("--n", metavar="N", help="Answers to each prompt; they share its KV blocks.")
]
MinTokensOption = Annotated[int, typer.Option(metavar="N", help="No answer ends before N tokens.")]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end of an answer.")]
StopOption = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="End the answer before TEXT; repeatable.", show_default=False),
]
StopTokenIdOption = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-id",
        metavar="ID",
        help="End the answer at this token; repeatable.",
        show_default=False,
    ),
]
LogprobsOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Write each token's log-probability and the N likeliest, 0 to 20.",
        show_default=False,
    ),
]
PromptLogprobsOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="The same for the tokens of the prompt.", show_default=False),
]
JsonSchemaOption = Annotated[
    str | None,
    typer.Option(metavar="FILE|JSON", help="Answers are JSON that this schema allows.", show_default=False),
]
RegexOption = Annotated[
    str | None,
    typer.Option(metavar="REGEX", help="Answers match this from end to end.", show_default=False),
]
ChoiceOption = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Answers are one of these; repeatable.", show_default=False),
]

FORMS = ("json_schema", "regex", "choice")
_AS_THEY_ARE = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
    "min_tokens",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
)


def sampling_params(context: typer.Context) -> SamplingParams:
    """The sampling that the command line asks for, without the seed.

    Raises:
        UsageError: a value that means nothing, or two forms of structured output.
        DataError: the file of a JSON schema cannot be read.
    """
    given = context.params
    forms: dict[str, Any] = {name: value for name in FORMS if (value := given[name]) not in (None, ())}
    if "json_schema" in forms:
        forms["json_schema"] = read_schema(forms["json_schema"])
    try:
        return SamplingParams(
            **{name: given[name] for name in _AS_THEY_ARE},
            logit_bias=_biases(given["logit_bias"] or ()),
            stop=tuple(given["stop"] or ()),
            stop_token_ids=tuple(given["stop_token_id"] or ()),
            structured_output=structured_output(forms),
        )
    except UsageError as error:
        raise as_option(error) from error


def as_option(error: UsageError) -> UsageError:
    """The same fault in the words of the command line."""
    if error.param is None:
        return error
    name = {"stop_token_ids": "stop-token-id"}.get(error.param, error.param.replace("_", "-"))
    return error.renamed(f"--{name}")


def structured_output(forms: dict[str, Any]) -> StructuredOutput | None:
    """The one of `forms`, which may be json_schema, regex and choice; None where there is none.

    Raises:
        UsageError: there are several, or it means nothing.
    """
    if len(forms) > 1:
        raise UsageError(f"{' and '.join(forms)} contradict each other", hint="give one of them")
    return StructuredOutput(**forms) if forms else None


def read_schema(text: str) -> str:
    """The JSON of a schema that is given as JSON or as the name of a file with it.

    Raises:
        DataError: the file cannot be read, or holds no JSON.
    """
    if text.lstrip().startswith("{"):
        return text
    try:
        schema = Path(text).read_text(encoding="utf-8")
        json.loads(schema)
    except OSError as error:
        hint = 'give an existing file, or the schema itself: {"type": "object", ...}'
        raise DataError(f"--json-schema {text}: {error.strerror}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"--json-schema {text}: not JSON: {error}", hint="write one JSON schema") from error
    return schema


def _biases(texts: Sequence[str]) -> dict[int, float]:
    pairs = [_bias(text) for text in texts]
    biases = dict(pairs)
    if len(biases) < len(pairs):
        raise UsageError("--logit-bias names a token twice", hint="give each token one bias")
    return biases


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise UsageError(f"--logit-bias {text!r} is not ID=X", hint="such as 50256=-100") from None
