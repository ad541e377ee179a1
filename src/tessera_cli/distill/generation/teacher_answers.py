"""Lets the teacher answer the prompts that a recipe leaves to it, before anything else is done."""

import fcntl
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tessera_cli.distill.data.teacher_written import (
    ANSWERS_FILE,
    PARTIAL_FILE,
    SOURCE_FILE,
    Answer,
    PromptSet,
)
from tessera_cli.distill.events import Listener, Note, StageStarted
from tessera_cli.distill.generation.answers import AnswerRequest, AnswerTokens, draw_answers
from tessera_cli.distill.inputs import RunInputs, Teacher, read_inputs
from tessera_cli.distill.runs.run_directory import write_text, writing
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.loading import load_engine
from tessera_cli.errors import RunError, UsageError
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.schema import Recipe

NOTE_SECONDS = 10.0
_LOCK_FILE = ".lock"


def read_answered_inputs(
    recipe: Recipe, *, home: Path, offline: bool, device: str, listener: Listener
) -> RunInputs:
    """`read_inputs`, once the teacher has answered all that is left to it; what it answered before is kept.

    Raises:
        UsageError: whatever can be known before the teacher answers; another process is at it.
        RunError: the file system refuses.
        KeyboardInterrupt: the user stopped it; every complete answer is kept.
    """

    def read() -> RunInputs:
        return read_inputs(recipe, home=home, offline=offline, notify=lambda text: listener(Note(text)))

    inputs = read()
    if not inputs.unanswered:
        return inputs
    listener(StageStarted("answer"))
    write_answers(
        inputs.unanswered, inputs.teacher, dtype=recipe.teacher.dtype, device=device, listener=listener
    )
    listener(StageStarted("prepare"))
    return read()


def write_answers(
    prompt_sets: Sequence[PromptSet], teacher: Teacher, *, dtype: str, device: str, listener: Listener
) -> None:
    """Let `teacher` answer what is missing of `prompt_sets`.

    Raises:
        UsageError: another process writes one of them.
        RunError: the file system refuses.
    """
    longest = max(
        len(prompt.token_ids) + prompts.sampling.max_tokens
        for prompts in prompt_sets
        for prompt in prompts.prompts
    )
    engine = load_engine(teacher.path, dtype=dtype, device=device, max_model_len=longest)
    for prompts in prompt_sets:
        with _claimed(prompts.directory):
            if prompts.is_complete:  # another split asked the same, or another process was quicker
                continue
            _complete(prompts, engine, teacher.tokenizer, listener)


def _complete(prompts: PromptSet, engine: Engine, tokenizer: Tokenizer, listener: Listener) -> None:
    write_text(prompts.directory / SOURCE_FILE, json.dumps(prompts.source, indent=2) + "\n")
    answers = prompts.answers()
    # A line that was cut off must not run into the next one.
    partial = prompts.directory / PARTIAL_FILE
    write_text(partial, "".join(_line(answer) for answer in answers.values()))
    progress = _Progress(prompts, len(answers), listener)
    requests = [
        AnswerRequest(prompt.index, prompt.token_ids, prompts.seed(prompt))
        for prompt in prompts.prompts
        if prompt.index not in answers
    ]
    with writing(partial), partial.open("a", encoding="utf-8") as file:
        for drawn in draw_answers(engine, requests, prompts.sampling):
            index = drawn.request.key
            answers[index] = _answer(drawn, tokenizer)
            file.write(_line(answers[index]))
            file.flush()
            progress.answered(len(drawn.token_ids))
    write_text(prompts.directory / ANSWERS_FILE, "".join(_line(answers[index]) for index in sorted(answers)))
    partial.unlink()


def _answer(drawn: AnswerTokens[int], tokenizer: Tokenizer) -> Answer:
    if max(drawn.token_ids) >= tokenizer.num_ids:  # a padded row of the vocabulary, which nobody trained
        raise RunError(
            f"the teacher answered prompt {drawn.request.key} with an id that its tokenizer does not have",
            hint="lower `top_p` or set `top_k`: such ids are never likely",
        )
    return Answer(
        index=drawn.request.key,
        prompt=tokenizer.decode(drawn.request.prompt, skip_special_tokens=False),
        answer=tokenizer.decode(drawn.token_ids),
        token_ids=drawn.token_ids,
        finish_reason=drawn.finish_reason,
    )


def _line(answer: Answer) -> str:
    return answer.model_dump_json() + "\n"


@contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    """Let no other process write to `directory`.

    Raises:
        UsageError: another one does, or the file system refuses.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / _LOCK_FILE).open("w")
    except OSError as error:
        raise UsageError(f"cannot create {directory}: {error.strerror}", hint="set TESSERA_HOME") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{directory} is being written by another process", hint="wait for it to end"
            ) from None
        yield


class _Progress:
    """Tells now and then how far a set is."""

    def __init__(self, prompts: PromptSet, done: int, listener: Listener) -> None:
        self._prompts, self._done, self._listener = prompts, done, listener
        self._num_tokens = 0
        self._start = self._told = time.perf_counter()
        if done:
            listener(Note(f"{prompts.directory} has {done:,} of {len(prompts.prompts):,} answers already"))

    def answered(self, num_tokens: int) -> None:
        """Count an answer of `num_tokens`."""
        self._done += 1
        self._num_tokens += num_tokens
        now = time.perf_counter()
        if now - self._told >= NOTE_SECONDS or self._done == len(self._prompts.prompts):
            self._told = now
            self._listener(
                Note(
                    f"teacher's answers to {self._prompts.place}: {self._done:,} of "
                    f"{len(self._prompts.prompts):,}, {self._num_tokens / (now - self._start):,.0f} tokens/s"
                )
            )
