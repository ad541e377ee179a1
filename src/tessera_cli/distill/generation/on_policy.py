"""The student's own answers, which replace those of the documents (GKD, arXiv 2306.13649).

A step is on-policy with a probability, drawn from the seed and its number alone. In such a step every
document that has a prompt becomes this prompt with the student's answer to it, and the loss is that of the
answer's tokens. The engine that answers reads the trainer's own weights: nothing is copied or loaded, and
answers follow what was trained a moment ago. Adapters are merged while it answers.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np

from tessera_cli.distill.data.document import Document
from tessera_cli.distill.data.on_policy_steps import answering_engine, is_on_policy
from tessera_cli.distill.events import Listener, StudentAnswers
from tessera_cli.distill.generation.answer_log import AnswerLog, LoggedAnswer
from tessera_cli.distill.generation.answers import AnswerRequest, AnswerTokens, draw_answers
from tessera_cli.distill.inputs import RunInputs, StepDocuments
from tessera_cli.distill.training.lora import merged_adapters
from tessera_cli.distill.training.processes import Processes
from tessera_cli.engine.engine import Engine
from tessera_cli.errors import RunError
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.sampling_section import OnPolicySection

Window = list[tuple[int, StepDocuments]]
"""Steps by their numbers, from 1."""
Place = tuple[int, int]
"""A step, and a document's place in it."""


class OnPolicyDocuments:
    """The documents of a run, with the student's answers where they are due.

    Args:
        inputs: the run.
        section: its recipe's `data.on_policy`.
        student: the module that is trained; its weights are read where they lie.
        log: what the student answered so far; the main process writes it.
        processes: who trains; each answers its share of the prompts with the weights that all have alike.
        listener: told of every window's answers.
    """

    def __init__(
        self,
        inputs: RunInputs,
        section: OnPolicySection,
        student: Decoder,
        log: AnswerLog,
        processes: Processes,
        listener: Listener,
    ) -> None:
        self._inputs, self._section, self._student = inputs, section, student
        self._log, self._processes, self._listener = log, processes, listener
        self._tokenizer: Tokenizer = inputs.teacher.tokenizer
        self.engine = Engine(student, answering_engine(inputs.recipe.data, section))

    def steps(self, start: int) -> Iterator[StepDocuments]:
        """The documents of every step after the first `start`.

        A window's answers are drawn when its first step is asked for. A run that begins inside a window finds
        them in the log, where they are from when the weights were those of the window's beginning.
        """
        every = self._section.every
        first = start - start % every
        with self._processes.main_first():
            if self._processes.is_main:
                self._log.rewind(first if start == first else first + every)
        numbered = enumerate(self._inputs.step_documents(first), start=first + 1)
        while window := list(islice(numbered, every)):
            due = self._due(window)
            answers = self._logged(due) if window[0][0] <= start else self._answer(due)
            for step, documents in window:
                if step > start:
                    yield _replaced(step, documents, answers)

    def _due(self, window: Window) -> dict[Place, list[int]]:
        """The prompts that the student answers for `window`."""
        return {
            (step, place): document.token_ids[: document.num_prompt_tokens].tolist()
            for step, documents in window
            if is_on_policy(step, self._section, self._inputs.recipe.seed)
            for place, document in enumerate(_flat(documents))
            if document.num_prompt_tokens
        }

    def _logged(self, due: dict[Place, list[int]]) -> dict[Place, LoggedAnswer]:
        answers = self._log.read()
        if missing := due.keys() - answers.keys():
            step, place = min(missing)
            raise RunError(
                f"{self._log.path} lacks the answer to prompt {place} of step {step}",
                hint="restore the file, or start the run anew with --overwrite",
            )
        return {place: answers[place] for place in due}

    def _answer(self, due: dict[Place, list[int]]) -> dict[Place, LoggedAnswer]:
        """Let the student answer, and log it."""
        if not due:  # in no process, so none waits for another
            return {}
        started = time.perf_counter()
        requests = [AnswerRequest(place, prompt, self._seed(*place)) for place, prompt in due.items()]
        shares = self._processes.gather(self._drawn(self._processes.share(requests)))
        for share in shares:
            if isinstance(share, RunError):
                raise share
        drawn = [answer for share in shares if not isinstance(share, RunError) for answer in share]
        answers = sorted(drawn, key=lambda answer: (answer.step, answer.place))
        if self._processes.is_main:
            self._log.append(answers)
        self._listener(
            StudentAnswers(
                step=answers[0].step,
                num_answers=len(answers),
                num_tokens=sum(len(answer.token_ids) for answer in answers),
                num_cut=sum(answer.finish_reason == "length" for answer in answers),
                seconds=time.perf_counter() - started,
            )
        )
        return {(answer.step, answer.place): answer for answer in answers}

    def _drawn(self, requests: Sequence[AnswerRequest[Place]]) -> list[LoggedAnswer] | RunError:
        """The answers, or why there are none: other processes wait for either."""
        was_training = self._student.training
        self._student.eval()
        # Whatever it computed before, it computed with other weights.
        self.engine.reset_prefix_cache()
        try:
            with merged_adapters(self._student):
                return [self._logged_form(one) for one in draw_answers(self.engine, requests, self._section)]
        except RunError as error:
            return error
        finally:
            self._student.train(was_training)

    def _logged_form(self, drawn: AnswerTokens[Place]) -> LoggedAnswer:
        step, place = drawn.request.key
        return LoggedAnswer(
            step=step,
            place=place,
            prompt=self._tokenizer.decode(drawn.request.prompt, skip_special_tokens=False),
            answer=self._tokenizer.decode(drawn.token_ids),
            token_ids=drawn.token_ids,
            finish_reason=drawn.finish_reason,
        )

    def _seed(self, step: int, place: int) -> int:
        """Of one answer: it depends on neither neighbours nor the split into micro-batches."""
        sequence = np.random.SeedSequence([self._inputs.recipe.seed, self._section.seed, step, place])
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def _replaced(step: int, documents: StepDocuments, answers: dict[Place, LoggedAnswer]) -> StepDocuments:
    places = iter(range(sum(map(len, documents))))
    return [
        [_with_answer(document, answers.get((step, next(places)))) for document in micro_batch]
        for micro_batch in documents
    ]


def _with_answer(document: Document, answer: LoggedAnswer | None) -> Document:
    if answer is None:
        return document
    return Document.answered(document.token_ids[: document.num_prompt_tokens], answer.token_ids)


def _flat(documents: StepDocuments) -> list[Document]:
    return [document for micro_batch in documents for document in micro_batch]
