"""`--base-url`: a running server in place of an engine of one's own, for `bench` and `generate`."""

from typing import TYPE_CHECKING, Annotated

import typer

from tessera_cli.cli import options
from tessera_cli.errors import UsageError
from tessera_cli.settings import Settings

if TYPE_CHECKING:
    from tessera_cli.serving.openai_server import Server

# Beside the engine's own options: what looks into it, and how its model is found.
_ENGINE_ONLY = (*options.ENGINE_OPTIONS, "trace", "offline")

BaseUrlOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Ask a running server with OpenAI's routes, such as http://127.0.0.1:8000, instead of an engine "
        "here; MODEL is then what the server calls it.",
        show_default=False,
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="For --base-url. Better in $TESSERA_API_KEY: other users of the machine see command lines.",
        show_default=False,
    ),
]


def refuse_engine_options(context: typer.Context, base_url: str | None, *others: str) -> None:
    """See that the options are for a server, if there is one; `others` are more that are not.

    Raises:
        UsageError: some are for an engine; the message names them.
    """
    if base_url is None:
        if not options.is_default(context, "api_key"):
            raise UsageError("--api-key is for a server", hint="give --base-url, or leave it out")
        return
    given = [
        f"--{name.replace('_', '-')}"
        for name in (*_ENGINE_ONLY, *others)
        if name in context.params and not options.is_default(context, name)
    ]
    if given:
        raise UsageError(
            f"{', '.join(given)}: for an engine of one's own, not for --base-url",
            hint="leave them out, or give them to the server",
        )


def find_server(
    base_url: str, argument: str | None, option: str | None, api_key: str | None, settings: Settings
) -> "Server":
    """The server of `--base-url`, with MODEL or `--model` as what it calls its model.

    Raises:
        UsageError: two models are given, or no such server answers.
    """
    from tessera_cli.serving.openai_server import Server

    options.check_one_model(argument, option)
    key = api_key or next(iter(settings.api_keys), None)
    return Server.find(base_url, model=argument or option, api_key=key)
