"""What the student answered in a run: a line for each answer, to read and to resume from."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from tessera_cli.distill.runs.run_directory import write_text, writing
from tessera_cli.errors import RunError


class LoggedAnswer(BaseModel):
    """One answer: the step that trains on it, and its document's place there.

    `token_ids` end with the token that ended the answer, unless `finish_reason` is "length".
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    step: PositiveInt
    place: NonNegativeInt
    prompt: str
    answer: str
    token_ids: list[NonNegativeInt]
    finish_reason: Literal["stop", "length"]


class AnswerLog:
    """A file that only grows, by whole windows; a run that goes back takes it back, too."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, answers: Sequence[LoggedAnswer]) -> None:
        """Add the answers of a window, on the disk before anything is trained on them.

        Raises:
            RunError: the file system refuses.
        """
        with writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write("".join(answer.model_dump_json() + "\n" for answer in answers))
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> dict[tuple[int, int], LoggedAnswer]:
        """All answers, by step and place."""
        return {(answer.step, answer.place): answer for answer in self._all()}

    def rewind(self, step: int) -> None:
        """Forget the answers for steps after `step`, and a line that was cut off."""
        kept = [answer for answer in self._all() if answer.step <= step]
        write_text(self.path, "".join(answer.model_dump_json() + "\n" for answer in kept))

    def _all(self) -> list[LoggedAnswer]:
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        try:
            return [LoggedAnswer.model_validate_json(line) for line in lines if line.endswith(b"\n")]
        except ValidationError as error:
            raise RunError(f"{self.path} is damaged", hint="start the run anew with --overwrite") from error
