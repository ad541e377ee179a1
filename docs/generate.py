"""Write the reference pages that come from the code.

python docs/generate.py            writes docs/reference/cli.md and docs/reference/recipe.schema.json
python docs/generate.py --check    writes nothing, exits 1 if a page is not what the code says
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from tessera_cli.recipe.schema import Recipe

REFERENCE = Path(__file__).parent / "reference"


def command_line() -> str:
    """Every command with its arguments and options, as Typer documents it."""
    command = [sys.executable, "-m", "typer", "tessera_cli.cli.app", "utils", "docs", "--name", "tessera"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip() + "\n"


def recipe_schema() -> str:
    """The JSON schema of a recipe, which editors use to complete and check recipe files."""
    return json.dumps(Recipe.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the reference pages that come from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if a page differs")
    check = parser.parse_args().check
    pages = {REFERENCE / "cli.md": command_line(), REFERENCE / "recipe.schema.json": recipe_schema()}
    stale = [
        path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if check:
        for path in stale:
            sys.stderr.write(f"{path}: differs from the code; run `make docs`\n")
        return 1 if stale else 0
    REFERENCE.mkdir(exist_ok=True)
    for path in stale:
        partial = path.with_suffix(".partial")
        partial.write_text(pages[path], encoding="utf-8")
        os.replace(partial, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
