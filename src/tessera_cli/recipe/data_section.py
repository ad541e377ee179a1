"""What a recipe says of the documents."""

from typing import Annotated, Literal

from pydantic import Field, StrictBool

from tessera_cli.recipe.section import Number, Section, Text


class DataSource(Section):
    """One file of documents."""

    path: Text
    """The file; relative to the recipe, or to the working directory when given on the command line."""
    format: Literal["text", "messages", "prompt_completion"]
    """What a document looks like."""


class DataSection(Section):
    """The documents to train on and the held-out ones to measure on."""

    train: Annotated[list[DataSource], Field(min_length=1)]
    """Files to train on."""
    eval: Annotated[list[DataSource], Field(min_length=1)]
    """Held-out files."""
    max_seq_len: Annotated[int, Field(ge=2), Number] = 1024
    """Tokens in a row; a longer document is skipped and counted."""
    packing: StrictBool = True
    """Whether a row holds as many whole documents as fit, or one."""
    train_on: Literal["completion", "all"] = "completion"
    """Which tokens carry the loss: those of the answers, or all."""
