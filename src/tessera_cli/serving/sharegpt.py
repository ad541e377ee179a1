"""Conversations as ShareGPT's files have them, for a benchmark with lengths from life."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tessera_cli.errors import DataError

_ASKS = ("human", "user")
_ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard")


@dataclass(frozen=True)
class Exchange:
    """The first question of a conversation and what was answered; `source` names it in errors."""

    question: str
    answer: str
    source: str


class _Turn(BaseModel):
    model_config = ConfigDict(strict=True)

    from_: Annotated[str, Field(alias="from")]
    value: str


class _Conversation(BaseModel):
    model_config = ConfigDict(strict=True)

    conversations: list[_Turn]

    @property
    def is_usable(self) -> bool:
        if len(self.conversations) < 2:
            return False
        asks, answers = self.conversations[:2]
        return (
            asks.from_ in _ASKS
            and answers.from_ in _ANSWERS
            and bool(asks.value.strip())
            and bool(answers.value.strip())
        )


_FILE: TypeAdapter[list[_Conversation]] = TypeAdapter(list[_Conversation])


def read_exchanges(path: Path, *, seed: int) -> tuple[list[Exchange], int]:
    """The exchanges that a file's conversations begin with, in an order drawn from `seed`.

    The file is a JSON list of objects with `conversations`, a list of `from` and `value`; what else an object
    holds is its own affair. The second result counts the conversations that do not begin with a question and
    an answer.

    Raises:
        DataError: the file cannot be read as that, or no conversation in it begins so.
    """
    try:
        conversations = _FILE.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file", hint="give a ShareGPT file") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise DataError(
            f"{path}: {_problem(error)}",
            hint='write [{"conversations": [{"from": "human", "value": "..."}, '
            '{"from": "gpt", "value": "..."}]}]',
        ) from error
    exchanges = [
        Exchange(one.conversations[0].value, one.conversations[1].value, f"{path} conversation {number}")
        for number, one in enumerate(conversations, start=1)
        if one.is_usable
    ]
    if not exchanges:
        raise DataError(f"{path}: no conversation begins with a question and an answer")
    random.Random(f"conversations {seed}").shuffle(exchanges)
    return exchanges, len(conversations) - len(exchanges)


def _problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    number, *rest = first["loc"] or (None,)
    where = "" if number is None else f"conversation {int(number) + 1}: "
    if rest:
        where += f"`{'.'.join(map(str, rest))}`: "
    return f"{where}{first['msg'][0].lower()}{first['msg'][1:]}"
