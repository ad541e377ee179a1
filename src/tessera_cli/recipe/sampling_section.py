"""What a recipe says of answers that a model draws: the teacher's before training, the student's in it."""

from typing import Annotated

from pydantic import Field

from tessera_cli.recipe.section import NonNegativeFloat, NonNegativeInt, Number, PositiveInt, Section


class SamplingSection(Section):
    """How an answer is drawn and when it ends; the same names as for `tessera generate`."""

    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1), Number] = 1.0
    """The likeliest tokens that together have this probability stay."""
    top_k: NonNegativeInt = 0
    """So many of the likeliest tokens stay; 0 is off."""
    max_tokens: PositiveInt = 256
    """Tokens of an answer, at most; a longer one is cut, kept without an end, and counted."""
    seed: NonNegativeInt = 0
    """Fixes every draw."""


class OnPolicySection(SamplingSection):
    """The student's own answers, which the teacher judges (GKD, arXiv 2306.13649)."""

    fraction: Annotated[float, Field(gt=0, le=1), Number] = 0.5
    """The probability that a step trains on the student's answers to its prompts, not on the documents'."""
    every: PositiveInt = 1
    """Steps between answers: those of so many steps are drawn at once, from the weights before them."""
    max_num_seqs: PositiveInt = 32
    """Answers that are drawn side by side; the KV cache holds so many rows of max_seq_len tokens."""
