"""The commented recipe that a user starts from."""

from importlib import resources
from pathlib import Path

from tessera_cli.errors import UsageError
from tessera_cli.files import write_file
from tessera_cli.recipe.schema import NAME_PATTERN


def write_template(name: str, directory: Path, *, force: bool) -> Path:
    """Write ``NAME.yaml`` into `directory`, as a whole or not at all.

    Raises:
        UsageError: the name cannot name a run, or the file exists and is not to be replaced.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name!r} cannot name a recipe", hint="use letters, digits, dots, dashes and underscores"
        )
    path = directory / f"{name}.yaml"
    if path.exists() and not force:
        raise UsageError(f"{path.name} exists", hint="choose another name, or replace it with --force")
    text = resources.files("tessera_cli.recipe").joinpath("template.yaml").read_text(encoding="utf-8")
    write_file(path, text.replace("name: NAME", f"name: {name}", 1))
    return path
