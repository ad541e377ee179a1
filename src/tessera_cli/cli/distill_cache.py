"""`tessera distill cache`: write, complete or verify the teacher's cache of a recipe."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera_cli.cli import options
from tessera_cli.cli.output import Output
from tessera_cli.errors import UsageError
from tessera_cli.settings import Settings, prepare_process

if TYPE_CHECKING:
    from tessera_cli.distill.events import Listener
    from tessera_cli.distill.teacher_cache.command import CacheReport
    from tessera_cli.recipe.loader import LoadedRecipe


def cache(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file.", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Values instead of the recipe's: teacher.cache.kind=topk",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Write nothing: read every byte, and compute some anew.")
    ] = False,
    device: options.DeviceOption = "auto",
    offline: options.OfflineOption = False,
    live: options.LiveOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Write the teacher's cache of a recipe, or what it lacks.

    A run does this by itself. Stopped at any time, the same command goes on.

    \b
    tessera distill cache recipe.yaml teacher.cache.kind=hidden
    tessera distill recipe.yaml teacher.cache.kind=hidden
    """
    output = Output.of(json=json, quiet=quiet)
    settings = Settings.from_env()
    settings = replace(settings, offline=offline or settings.offline)
    prepare_process(offline=settings.offline)
    if quiet and live:
        raise UsageError("--quiet and --live exclude each other")
    from tessera_cli.recipe.loader import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    if loaded.recipe.teacher.cache.kind == "none":
        raise UsageError(
            f"{recipe} has no teacher cache", hint="choose one, such as `teacher.cache.kind=hidden`"
        )
    reports = _fill(loaded, output, settings, live=live, device=device, verify=verify)
    output.document([report.as_dict() for report in reports])
    output.rows(_rows(reports), header=("", *(report.figures.split for report in reports)))
    for report in reports:
        output.note(f"{report.figures.split}: {report.figures.path}")


def _fill(
    loaded: "LoadedRecipe", output: Output, settings: Settings, *, live: bool | None, **arguments: Any
) -> "list[CacheReport]":
    from tessera_cli.cli.terminal import wants_live
    from tessera_cli.cli.training_view import TrainingView

    shows_live = wants_live(output.console, live, no_progress=settings.no_progress)
    from tessera_cli.distill.teacher_cache.command import cache_recipe

    def fill(listener: "Listener") -> "list[CacheReport]":
        return cache_recipe(
            loaded.recipe, listener=listener, home=settings.home, offline=settings.offline, **arguments
        )

    if output.is_quiet:
        return fill(lambda event: None)
    cache = loaded.recipe.teacher.cache
    header = {"recipe": str(loaded.path), "teacher": loaded.recipe.teacher.model, "kind": cache.kind}
    with TrainingView(output.console, shows_live, header) as view:
        return fill(view.on_event)


def _rows(reports: "list[CacheReport]") -> list[tuple[str, ...]]:
    figures = [report.figures for report in reports]
    rows = [
        ("documents", *(f"{one.num_documents:,}" for one in figures)),
        ("supervised tokens", *(f"{one.num_tokens:,}" for one in figures)),
        ("shards", *(f"{one.num_shards:,}" for one in figures)),
        ("bytes", *(f"{one.file_bytes:,}" for one in figures)),
        ("bytes/token", *(f"{one.bytes_per_token:,.1f}" for one in figures)),
        ("kept mass", *(f"{one.kept_mass:.2%}" for one in figures)),
        ("KL to the teacher", *(f"{one.kl:.3g}" for one in figures)),
    ]
    checks = [report.verification for report in reports if report.verification is not None]
    if checks:
        rows.append(("computed anew", *(f"{one.num_recomputed:,}" for one in checks)))
        rows.append(("equal to the bit", *(f"{one.num_equal:,}" for one in checks)))
    return rows
