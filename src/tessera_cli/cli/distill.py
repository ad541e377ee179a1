"""`tessera distill`: plan, run, measure and look at distillations; heavy imports inside the commands."""

import json as json_library
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tessera_cli.cli import options
from tessera_cli.cli.default_command import DefaultRunGroup
from tessera_cli.cli.distill_cache import cache
from tessera_cli.cli.distill_eval import evaluate
from tessera_cli.cli.distill_views import (
    RUN_COLUMNS,
    run_header,
    run_row,
    show_plan,
    show_run,
)
from tessera_cli.cli.output import Output
from tessera_cli.errors import ExitCode, UsageError
from tessera_cli.settings import Settings, prepare_process

if TYPE_CHECKING:
    from tessera_cli.recipe.loader import LoadedRecipe

app = typer.Typer(
    cls=DefaultRunGroup,
    # What is no option of the group belongs to `run`.
    context_settings={"ignore_unknown_options": True},
    rich_markup_mode=None,
    help="Train a small student from a large teacher.\n\n"
    "`tessera distill RECIPE` means `tessera distill run RECIPE`; its options: `tessera distill run --help`.",
)

COMMANDS = ("run", "plan", "cache", "init", "eval", "show")

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Values instead of the recipe's: train.max_steps=10",
        show_default=False,
    ),
]


@app.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.USAGE)


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "-o", metavar="DIR", help="[default: runs/NAME-UTC]", show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in -o, else the newest unfinished one.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in -o.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="SEED", help="The same as seed=SEED.", show_default=False)
    ] = None,
    device: options.DeviceOption = "auto",
    offline: options.OfflineOption = False,
    live: options.LiveOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Train, measure and export the student of a recipe.

    \b
    tessera distill recipe.yaml
    tessera distill recipe.yaml train.max_tokens=2_000_000 -o runs/longer
    tessera distill recipe.yaml --resume
    """
    settings = _settings(offline)
    is_main = settings.rank == 0
    output = Output.of(json=json and is_main, quiet=quiet or not is_main)
    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    if dry_run and (resume or overwrite or output_dir is not None):
        raise UsageError("--dry-run writes nothing: it takes no --output-dir, --resume or --overwrite")
    if settings.is_left_alone:
        raise UsageError(
            "accelerate was asked for several processes and has started only this one",
            hint="without GPUs: `torchrun --nproc-per-node 2 -m tessera_cli distill run RECIPE --device cpu`",
        )
    from tessera_cli.recipe.loader import load_recipe

    loaded = load_recipe(recipe, [*(overrides or ()), *(() if seed is None else (f"seed={seed}",))])
    if dry_run:
        if is_main:
            show_plan(loaded, output, settings)
        return
    run_dir = output_dir or (_unfinished(loaded) if resume else _new_run_dir(loaded))
    _train(
        loaded,
        output,
        settings,
        live=live if is_main else None,
        run_dir=run_dir,
        resume=resume,
        overwrite=overwrite,
        device=device,
    )
    if is_main:
        show_run(run_dir, output)


@app.command()
def plan(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A YAML file.", show_default=False)
    ] = None,
    overrides: OverridesArgument = None,
    yaml: Annotated[bool, typer.Option("--yaml", help="Only the recipe with every default.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Only the JSON schema of recipes.")] = False,
    offline: options.OfflineOption = False,
    json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Check a recipe and show its models, steps, tokens and memory.

    Loads no weights.
    """
    output = Output.of(json=json)
    settings = _settings(offline)
    if json + yaml + schema > 1:
        raise UsageError("--json, --yaml and --schema exclude each other")
    if schema:
        from tessera_cli.recipe.schema import Recipe

        if recipe is not None:
            raise UsageError("--schema is the same for every recipe: it takes none")
        output.data(json_library.dumps(Recipe.model_json_schema(), indent=2, ensure_ascii=False))
        return
    if recipe is None:
        raise UsageError("no recipe is given", hint="`tessera distill init` writes one")
    from tessera_cli.recipe.loader import dump_recipe, load_recipe

    loaded = load_recipe(recipe, overrides or ())
    if yaml:
        output.data(dump_recipe(loaded.recipe), end="")
        return
    show_plan(loaded, output, settings)


app.command()(cache)


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the recipe.")] = "student",
    force: Annotated[bool, typer.Option("--force", help="Replace NAME.yaml.")] = False,
    debug: options.DebugOption = False,
) -> None:
    """Write a commented recipe to NAME.yaml."""
    from tessera_cli.recipe.template import write_template

    path = write_template(name.removesuffix(".yaml"), Path.cwd(), force=force)
    output = Output()
    output.note(f"wrote {path.name}; put your documents where its `data` section says, then:")
    output.data(f"tessera distill plan {path.name}\ntessera distill {path.name}")


app.command("eval")(evaluate)


@app.command()
def show(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)
    ] = None,
    json: options.JsonOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Show one run, or list the runs under ./runs."""
    output = Output.of(json=json)
    if run_dir is not None:
        show_run(run_dir, output)
        return
    from tessera_cli.distill.runs.run_status import list_runs

    runs = list_runs(options.RUNS_DIR)
    output.document([run.as_dict() for run in runs])
    if not runs:
        output.note("no runs under ./runs")
        return
    output.rows([run_row(run) for run in runs], header=RUN_COLUMNS)


def _settings(offline: bool) -> Settings:
    """The process's settings with the command's own --offline, and the process made ready for libraries."""
    settings = Settings.from_env()
    settings = replace(settings, offline=offline or settings.offline)
    prepare_process(offline=settings.offline)
    return settings


def _new_run_dir(loaded: "LoadedRecipe") -> Path:
    return options.RUNS_DIR / f"{loaded.recipe.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def _unfinished(loaded: "LoadedRecipe") -> Path:
    from tessera_cli.distill.runs.run_status import latest_unfinished

    found = latest_unfinished(options.RUNS_DIR, loaded)
    if found is None:
        raise UsageError(
            f"nothing to resume: ./runs has no unfinished run of {loaded.recipe.name!r}",
            hint="name its directory with -o, or leave --resume out",
        )
    return found.path


def _train(
    loaded: "LoadedRecipe", output: Output, settings: Settings, *, live: bool | None, **arguments: Any
) -> None:
    from tessera_cli.cli.terminal import wants_live
    from tessera_cli.cli.training_view import TrainingView

    if output.is_quiet and live:
        raise UsageError("--quiet and --live exclude each other")
    shows_live = wants_live(output.console, live, no_progress=settings.no_progress)
    from tessera_cli.distill.pipeline import run_recipe

    arguments |= {"home": settings.home, "offline": settings.offline}
    if output.is_quiet:
        run_recipe(loaded, listener=lambda event: None, **arguments)
        return
    with TrainingView(output.console, shows_live, run_header(loaded, arguments["run_dir"])) as view:
        run_recipe(loaded, listener=view.on_event, **arguments)
