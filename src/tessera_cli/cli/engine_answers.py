"""The answers of an engine in this process, for `tessera generate`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tessera_cli.cli.answers import Answer
from tessera_cli.cli.live import EngineView
from tessera_cli.cli.loading import LoadedModel
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import RunError

if TYPE_CHECKING:
    from tessera_cli.cli.prompt_line import Messages, Prompt
    from tessera_cli.serving.llm import RunOptions
    from tessera_cli.serving.outputs import RequestOutput


def answer_by_engine(
    model: LoadedModel,
    prompts: Sequence["Prompt"],
    conversations: "list[Messages] | None",
    params: list[SamplingParams],
    *,
    fails_fast: bool,
    on_text: Callable[[str], None] | None,
    view: EngineView | None,
) -> list[Answer]:
    """Answer `conversations`, or the prompts' texts where there are none.

    Raises:
        RunError: a prompt failed, and one that fails is to end everything.
    """

    def on_finished(result: "RequestOutput") -> None:
        if result.error is not None and fails_fast:
            raise RunError(f"a prompt failed: {result.error}", hint="--on-error skip goes on with the others")
        if view is not None:
            times = [one.metrics for one in result.outputs if one.metrics is not None]
            view.on_finished(times if result.error is None else [])

    run: RunOptions = {
        "priority": [prompt.priority for prompt in prompts],
        "cache_salt": [prompt.cache_salt for prompt in prompts],
        "on_text": None if on_text is None else lambda _, __, piece: on_text(piece),
        "on_finished": on_finished,
        "on_step": None if view is None else view.on_step,
    }
    if conversations is None:
        outputs = model.llm.generate([prompt.text or "" for prompt in prompts], params, **run)
    else:
        outputs = model.llm.chat(conversations, params, **run)
    return [
        answer
        for index, (given, result) in enumerate(zip(prompts, outputs, strict=True))
        for answer in Answer.all_of(index, given, result)
    ]
