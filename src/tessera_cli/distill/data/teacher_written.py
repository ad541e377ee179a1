"""Prompts that the teacher answers once, and where its answers are kept (arXiv 1606.07947).

source.json           what the answers depend on
answers.jsonl         all answers, in the prompts' order; it is there only if they are complete
answers.partial.jsonl what there is until then, in the order in which answers ended

An answer depends on the teacher, its prompt and the prompt's own seed, never on what else is answered beside
it: a set that was stopped goes on with what is missing and ends as if nothing had happened.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from tessera_cli.errors import DataError
from tessera_cli.recipe.sampling_section import SamplingSection

ANSWERS_FILE = "answers.jsonl"
PARTIAL_FILE = "answers.partial.jsonl"
SOURCE_FILE = "source.json"


class Answer(BaseModel):
    """One answer as a line has it.

    `index` is the prompt's place in its file, from 0; `token_ids` are the answer's, with the token that ended
    it; `finish_reason` "length" is an answer that was cut.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    index: NonNegativeInt
    prompt: str
    answer: str
    token_ids: list[NonNegativeInt]
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True)
class Prompt:
    """A prompt's place in its file, from 0, and its ids."""

    index: int
    token_ids: list[int]


@dataclass(frozen=True)
class Writer:
    """The teacher as far as its answers depend on it, and where Tessera keeps them."""

    teacher_fingerprint: str
    teacher_dtype: str
    home: Path


@dataclass(frozen=True, eq=False)
class PromptSet:
    """The prompts of one source that the teacher answers, and the directory of the answers."""

    place: str
    prompts: tuple[Prompt, ...]
    sampling: SamplingSection
    source: dict[str, str]
    directory: Path

    @classmethod
    def of(
        cls, place: str, prompts: Sequence[Prompt], sampling: SamplingSection, writer: Writer
    ) -> "PromptSet":
        """The set of `prompts`; its directory is named after all that the answers depend on."""
        digest = hashlib.sha256()
        for prompt in prompts:
            digest.update(json.dumps([prompt.index, prompt.token_ids]).encode())
        source = {
            "teacher": writer.teacher_fingerprint,
            "teacher dtype": writer.teacher_dtype,
            "prompts": digest.hexdigest(),
            "sampling": sampling.model_dump_json(),
        }
        name = hashlib.sha256(json.dumps(source).encode()).hexdigest()[:16]
        return cls(place, tuple(prompts), sampling, source, writer.home / "teacher-written" / name)

    @property
    def is_complete(self) -> bool:
        """Whether the teacher has answered all prompts."""
        return not self.prompts or (self.directory / ANSWERS_FILE).is_file()

    def seed(self, prompt: Prompt) -> int:
        """The seed of one answer: as in `tessera generate`, each prompt has its own."""
        return self.sampling.seed + prompt.index

    def answers(self) -> dict[int, Answer]:
        """The answers that there are, by the prompt's index; a line that was cut off is none.

        Raises:
            DataError: a file is damaged.
        """
        path = self.directory / (ANSWERS_FILE if self.is_complete else PARTIAL_FILE)
        if not path.is_file():
            return {}
        known = {prompt.index for prompt in self.prompts}
        found: dict[int, Answer] = {}
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                continue
            try:
                answer = Answer.model_validate_json(line)
            except ValidationError as error:
                raise DataError(f"{path} line {number} is damaged", hint=f"remove {path}") from error
            if answer.index in known:
                found[answer.index] = answer
        if self.is_complete and len(found) != len(known):
            raise DataError(f"{path} has {len(found)} of {len(known)} answers", hint=f"remove {path}")
        return found
