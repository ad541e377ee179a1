"""The answers of a running server, for `tessera generate --base-url`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tessera_cli.cli.answers import Answer
from tessera_cli.cli.live import EngineView
from tessera_cli.cli.server_view import as_stats
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import DataError, RunError, UsageError
from tessera_cli.serving.openai_server import Server
from tessera_cli.serving.server_load import ServerLoad
from tessera_cli.serving.server_request import ServerRequest
from tessera_cli.serving.streamed_answer import StreamedAnswer

if TYPE_CHECKING:
    from tessera_cli.cli.prompt_line import Messages, Prompt

MAX_IN_FLIGHT = 256  # as many as an engine runs at once by default


def requests_of(
    server: Server,
    prompts: Sequence["Prompt"],
    conversations: "list[Messages] | None",
    params: Sequence[SamplingParams],
) -> list[ServerRequest]:
    """What the server is asked, one request for each prompt; prompts that it cannot answer are found here.

    Raises:
        DataError: a prompt asks for what no route has a field for.
    """
    requests = []
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        asked = (prompt.text or "") if conversations is None else conversations[index]
        request = ServerRequest(asked, one, prompt.priority, prompt.cache_salt)
        try:
            # A server counts the tokens of all samples together, and a completion's log-probabilities
            # have another shape than a chat's.
            if one.n > 1:
                raise UsageError("n above 1 cannot be asked of a server", hint="repeat the prompt instead")
            if one.logprobs is not None and conversations is None:
                raise UsageError("logprobs of a server's are a chat's", hint="use --chat")
            request.body(server.model)
        except UsageError as error:
            raise DataError(f"{prompt.source}: {error.message}", hint=error.hint) from error
        requests.append(request)
    return requests


def answer_by_server(
    server: Server,
    prompts: Sequence["Prompt"],
    requests: Sequence[ServerRequest],
    *,
    fails_fast: bool,
    on_text: Callable[[str], None] | None,
    view: EngineView | None,
) -> list[Answer]:
    """Ask everything at once.

    Raises:
        RunError: a prompt failed, and one that fails is to end everything.
    """
    answers: dict[int, Answer] = {}

    def on_answer(index: int, answer: StreamedAnswer | RunError) -> None:
        if isinstance(answer, RunError) and fails_fast:
            raise RunError(
                f"a prompt failed: {answer.message}", hint="--on-error skip goes on with the others"
            )
        answers[index] = _answer(index, prompts[index], answer)
        if view is not None:
            view.on_finished([] if isinstance(answer, RunError) else answer.samples)

    load = ServerLoad(
        server,
        requests,
        limit=MAX_IN_FLIGHT,
        on_answer=on_answer,
        on_text=None if on_text is None else lambda _, piece: on_text(piece),
    )
    load.run(None if view is None else lambda progress: view.on_step(as_stats(progress)))
    return [answers[index] for index in range(len(requests))]


def _answer(index: int, prompt: "Prompt", answer: StreamedAnswer | RunError) -> Answer:
    if isinstance(answer, RunError):
        return Answer(index, 0, prompt.text, prompt.messages, "", "error", None, 0, 0, None, answer.message)
    [sample] = answer.samples
    rows = [row for part in sample.logprobs for row in part.get("content") or ()]
    return Answer(
        index=index,
        sample_index=0,
        prompt=prompt.text,
        messages=prompt.messages,
        text=sample.text,
        finish_reason=str(sample.finish_reason),
        stop_reason=sample.stop_reason,
        num_prompt_tokens=answer.num_prompt_tokens,
        num_output_tokens=answer.num_output_tokens,
        ttft_ms=None if sample.ttft is None else round(sample.ttft * 1000, 3),
        error=None,
        logprobs={"content": rows} if rows else None,
    )
