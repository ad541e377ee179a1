"""The `tessera` program: its commands, and the boundary where an error becomes a message and an exit code."""

import errno
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn, TextIO

import typer

from tessera_cli import __version__
from tessera_cli.cli import bench, distill
from tessera_cli.cli.default_command import DEFAULT
from tessera_cli.cli.environment import env
from tessera_cli.cli.generate import generate
from tessera_cli.cli.output import Output
from tessera_cli.cli.quantize import quantize
from tessera_cli.cli.serve import serve
from tessera_cli.cli.simulate import simulate
from tessera_cli.cli.trace import trace
from tessera_cli.errors import DivergedError, ExitCode, GateError, RunError, TesseraError, UsageError
from tessera_cli.settings import Settings, is_main_process

app = typer.Typer(
    name="tessera",
    help="Distil a large language model into a small one; run it in a paged, batched engine.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(distill.app, name="distill")
app.add_typer(bench.app, name="bench")
app.command("generate")(generate)
app.command("serve")(serve)
app.command("quantize")(quantize)
app.command("simulate")(simulate)
app.command("trace")(trace)
app.command("env")(env)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tessera {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.USAGE)
    try:
        Path.cwd()
    except OSError:
        raise UsageError("the working directory is gone", hint="change to one that exists") from None
    level = Settings.from_env().log_level.upper()
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s", force=True
    )


def main() -> NoReturn:
    """Run the program on the process's arguments and exit."""
    _prepare_streams()
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line; never raises for what a user can do wrong.

    Returns:
        The exit code, see `ExitCode`.
    """
    output = Output.of(json="--json" in arguments)
    try:
        code = app(args=list(arguments), prog_name="tessera", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = ExitCode.INTERRUPTED
    except Exception as error:
        return _report(error, arguments, output)
    if code == ExitCode.INTERRUPTED:
        return _report(_InterruptedError("interrupted"), arguments, output)
    return code or ExitCode.SUCCESS


def _prepare_streams() -> None:
    """Make the process's streams take any text, and be there: `>&-` leaves None, and its number to others."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The lowest free number is taken, which is the stream's own.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Files and pipes get UTF-8 in every locale, as JSON asks; a terminal gets what it can show.
        sys.stdout.reconfigure(encoding=None if sys.stdout.isatty() else "utf-8", errors="replace")


class _InterruptedError(TesseraError):
    exit_code = ExitCode.INTERRUPTED


def _report(error: Exception, arguments: Sequence[str], output: Output) -> int:
    explained = _explain(error, arguments)
    is_main = is_main_process()
    if not is_main and isinstance(explained, UsageError | DivergedError | _InterruptedError):
        return explained.exit_code  # the main process tells the same
    if not is_main or isinstance(error, GateError):
        output = Output()  # there is one JSON document on stdout, the main process's or the figures
    try:
        sys.stdout.flush()
    except OSError:
        _discard(sys.stdout)
    try:
        if _wants_traceback(arguments):
            traceback.print_exception(error)
        # Nobody reads any more: that is no news to anybody.
        if not isinstance(error, BrokenPipeError):
            output.error(explained)
    except OSError:
        _discard(sys.stdout)
        _discard(sys.stderr)
    return explained.exit_code


def _discard(stream: TextIO) -> None:
    """Send a stream that cannot be written to where what Python flushes at exit does no harm."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _explain(error: Exception, arguments: Sequence[str]) -> TesseraError:
    """The error as a user should read it."""
    if isinstance(error, TesseraError):
        return error
    if isinstance(error, typer.TyperException):
        message = error.format_message().strip().rstrip(".")
        message = message[:1].lower() + message[1:]
        return UsageError(message, hint=f"`{_help_page(arguments)}` shows what there is")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return RunError(f"no space left on the disk: {error.filename or 'output'}", hint="free some space")
    if isinstance(error, OSError) and error.strerror is not None:
        return RunError(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
    if isinstance(error, MemoryError) or _is_torch_out_of_memory(error):
        trains = next(iter(arguments), None) == "distill"
        hint = "`train.micro_batch_size` or `train.loss_chunk_tokens`" if trains else "`--kv-cache-memory`"
        return RunError(f"out of memory: {_first_line(error)}", hint=f"lower {hint}")
    return TesseraError(
        f"{type(error).__name__}: {_first_line(error)}",
        hint="this is a bug in Tessera; TESSERA_DEBUG=1 shows the traceback",
    )


def _help_page(arguments: Sequence[str]) -> str:
    first, second = [*arguments, "", ""][:2]
    if first == "distill":
        return f"tessera distill {second if second in distill.COMMANDS else DEFAULT} --help"
    return (
        f"tessera {first} --help"
        if first in ("generate", "serve", "bench", "quantize", "simulate", "trace", "env")
        else "tessera --help"
    )


def _is_torch_out_of_memory(error: Exception) -> bool:
    # torch is imported only if the command got that far.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _wants_traceback(arguments: Sequence[str]) -> bool:
    if "--debug" in arguments:
        return True
    try:
        return Settings.from_env().debug
    except UsageError:
        return False
