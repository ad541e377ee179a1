"""A command group in which a recipe alone means `run`."""

import difflib
from pathlib import Path
from typing import Any

from typer.core import TyperGroup

from tessera_cli.errors import UsageError

DEFAULT = "run"


class DefaultRunGroup(TyperGroup):
    """Takes ``distill RECIPE`` as ``distill run RECIPE``; the group ignores options it does not know."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Insert `run` before what is no subcommand but can be a recipe or an option of `run`.

        Raises:
            UsageError: the first word is neither a subcommand nor a recipe.
        """
        word = args[0]
        if word not in self.commands:
            if _can_start_a_run(word):
                args = [DEFAULT, *args]
            elif not ctx.resilient_parsing:
                raise self._neither(ctx.command_path, word)
        return super().resolve_command(ctx, args)

    def _neither(self, command_path: str, word: str) -> UsageError:
        close = difflib.get_close_matches(word, self.commands, n=1)
        names = f"`{command_path} {close[0]}`" if close else ", ".join(f"`{name}`" for name in self.commands)
        recipes = difflib.get_close_matches(word, [p.name for p in Path().glob("*.y*ml")], n=1, cutoff=0.5)
        recipe = recipes[0] if recipes else f"{word}.yaml"
        return UsageError(
            f"{word!r} is neither a command of `{command_path}` nor a file",
            hint=f"did you mean {names}, or the recipe `{recipe}`?",
        )


def _can_start_a_run(word: str) -> bool:
    return word.startswith("-") or "/" in word or word.endswith((".yaml", ".yml")) or Path(word).exists()
