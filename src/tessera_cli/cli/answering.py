"""One job of `tessera generate`, answered by an engine in this process or by a server."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from tessera_cli.cli.answers import Answer, summarize
from tessera_cli.cli.live import EngineView
from tessera_cli.cli.loading import LoadedModel
from tessera_cli.cli.output import Output
from tessera_cli.cli.prompts import check_params, conversations_of
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.stats import EngineStats

if TYPE_CHECKING:
    from tessera_cli.cli.prompt_line import Prompt
    from tessera_cli.serving.openai_server import Server

Answered = tuple[list[Answer], dict[str, Any]]


@dataclass(frozen=True)
class Answering:
    """What is asked, and how the work is shown; both ways return the answers in order and their summary.

    With `fails_fast` the first prompt that fails ends everything; `on_text` gets a sole answer in pieces.
    """

    prompts: Sequence["Prompt"]
    params: list[SamplingParams]
    output: Output
    shows_progress: bool
    live: bool
    log_interval: float
    fails_fast: bool
    on_text: Callable[[str], None] | None

    def by_engine(self, model: LoadedModel, chat: bool | None, system: str | None) -> Answered:
        """Answer with a model that is loaded.

        Raises:
            DataError: a prompt asks for what the model cannot do; before any work.
            RunError: a prompt failed and fails fast.
        """
        from tessera_cli.cli.engine_answers import answer_by_engine

        check_params(self.prompts, self.params, model.llm.check)
        has_template = model.llm.tokenizer.chat_template is not None
        conversations = conversations_of(self.prompts, chat, system, has_template)
        view = self._view(model.title("generate"), model.llm.engine.stats())
        started = monotonic()
        with view or nullcontext():
            answers = answer_by_engine(
                model,
                self.prompts,
                conversations,
                self.params,
                fails_fast=self.fails_fast,
                on_text=self.on_text,
                view=view,
            )
        return answers, summarize(answers, monotonic() - started, model.peak_memory_bytes())

    def by_server(self, server: "Server", chat: bool | None, system: str | None) -> Answered:
        """Ask a server; prompts are chats unless `chat` is false.

        Raises:
            DataError: a prompt asks for what a server's routes cannot; before any work.
            RunError: a prompt failed and fails fast.
        """
        from tessera_cli.cli.server_answers import answer_by_server, requests_of
        from tessera_cli.cli.server_view import as_stats
        from tessera_cli.serving.server_load import ServerProgress

        self.output.note(f"server    {server.url}, model {server.model}")
        conversations = conversations_of(self.prompts, chat, system, True)
        requests = requests_of(server, self.prompts, conversations, self.params)
        view = self._view(["tessera generate", server.model, server.url], as_stats(ServerProgress()))
        started = monotonic()
        with view or nullcontext():
            answers = answer_by_server(
                server,
                self.prompts,
                requests,
                fails_fast=self.fails_fast,
                on_text=self.on_text,
                view=view,
            )
        return answers, summarize(answers, monotonic() - started, None)

    def _view(self, title: list[str], start: EngineStats) -> EngineView | None:
        if not self.shows_progress:
            return None
        return EngineView(
            self.output.console,
            live=self.live,
            title=title,
            num_requests=len(self.prompts),
            start=start,
            log_interval=self.log_interval,
        )
