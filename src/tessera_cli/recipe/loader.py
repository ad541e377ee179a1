"""A recipe file and `key=value` overrides to a checked recipe, with the origin of every value."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tessera_cli.errors import RecipeError, UsageError
from tessera_cli.recipe.document import (
    Document,
    KeyPath,
    Problem,
    dotted,
    dump_document,
    parse_document,
    parse_value,
)
from tessera_cli.recipe.schema import Recipe
from tessera_cli.recipe.suggest import expectation, show, suggest

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
_LOCAL = ("/", "./", "../", "~")


@dataclass(frozen=True)
class Origin:
    """Where a value comes from; `line` is 1-based and only set for the recipe file."""

    source: Literal["default", "recipe", "override"]
    line: int | None = None

    def __str__(self) -> str:
        return f"line {self.line}" if self.line is not None else self.source


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe; `origins` has every dotted key that holds a value, a list of numbers being one."""

    recipe: Recipe
    origins: dict[str, Origin]
    path: Path


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read and check a recipe.

    Args:
        path: a YAML file; paths in it are relative to its directory.
        overrides: ``train.max_steps=10``; the value is a YAML 1.2 value, paths are relative to the working
            directory, and each key is given at most once.

    Raises:
        UsageError: the file cannot be read.
        RecipeError: the file or an override is wrong; `problems` has every fault.
    """
    document = parse_document(_read(path))
    if document.value is None and not document.problems:
        document.value = {}
    if document.problems and document.value is None:
        raise _error(path, document.problems)
    if not isinstance(document.value, dict):
        raise _error(path, [Problem("line 1", "", f"expected sections, got {show(document.value)}")])
    overridden = _apply_overrides(document, overrides)
    _make_paths_absolute(document, path.resolve().parent, overridden)
    try:
        recipe = Recipe.model_validate(document.value)
    except ValidationError as error:
        found = [_problem(e, document, overridden) for e in error.errors(include_url=False)]
        raise _error(path, document.problems + found) from None
    if document.problems:
        raise _error(path, document.problems)
    return LoadedRecipe(recipe, _origins(recipe, document, overridden), path)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads back equal."""
    return dump_document(recipe.model_dump())


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"no such recipe: {path}", hint="`tessera distill init` writes one") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _apply_overrides(document: Document, overrides: Iterable[str]) -> set[KeyPath]:
    """Write the overrides into `document.value` and return their key paths."""
    overridden: set[KeyPath] = set()
    for text in overrides:
        key, equals, value_text = text.partition("=")
        if not equals or not _KEY.fullmatch(key):
            document.problems.append(Problem("override", "", f"expected KEY=VALUE, got {show(text)}"))
            continue
        path = tuple(int(part) if part.isdecimal() else part for part in key.split("."))
        value = parse_value(value_text)
        if path in overridden:
            document.problems.append(Problem("override", key, "given twice"))
        elif value.problems:
            document.problems.append(Problem("override", key, value.problems[0].text))
        elif (trouble := _assign(document.value, path, value.value)) is not None:
            document.problems.append(Problem("override", key, trouble))
        else:
            overridden.add(path)
    return overridden


def _assign(root: dict[str, Any], path: KeyPath, value: Any) -> str | None:
    """Set `path` to `value`, making sections on the way; returns what stands against it, if anything."""
    node: Any = root
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(node, list):
            if not isinstance(part, int) or part >= len(node):
                return f"`{dotted(path[:depth])}` is a list of {len(node)}, there is no `{part}` in it"
        elif not isinstance(node, dict):
            return f"`{dotted(path[:depth])}` is {show(node)}, not a section"
        elif isinstance(part, int):
            return f"`{dotted(path[:depth])}` is not a list"
        elif not last and node.get(part) is None:
            if isinstance(path[depth + 1], int):
                return f"`{dotted(path[: depth + 1])}` is not a list"
            node[part] = {}
        if last:
            node[part] = value
        else:
            node = node[part]
    return None


def _make_paths_absolute(document: Document, recipe_dir: Path, overridden: set[KeyPath]) -> None:
    def absolute(node: dict[str, Any], key: str, path: KeyPath, *, may_be_hub_id: bool) -> None:
        text = node.get(key)
        if not isinstance(text, str) or not text:
            return
        base = Path.cwd() if _is_overridden(path, overridden) else recipe_dir
        is_local = not may_be_hub_id or text.startswith(_LOCAL) or text.endswith((".gguf", "/"))
        try:
            local = base / Path(text).expanduser()
            if is_local or text in (".", "..") or local.exists():
                node[key] = str(local.resolve())
        except (OSError, RuntimeError, ValueError) as error:  # too long, no such ~user, a NUL
            where = _where(path, document, overridden)
            document.problems.append(Problem(where, dotted(path), f"no path: {error}"))

    value = document.value
    for section in ("teacher", "student"):
        node = value.get(section)
        if isinstance(node, dict) and not str(node.get("model")).startswith("package:"):
            absolute(node, "model", (section, "model"), may_be_hub_id=True)
        cache = node.get("cache") if isinstance(node, dict) else None
        if isinstance(cache, dict):
            absolute(cache, "path", (section, "cache", "path"), may_be_hub_id=False)
    data = value.get("data")
    for split in ("train", "eval"):
        sources = data.get(split) if isinstance(data, dict) else None
        for i, source in enumerate(sources if isinstance(sources, list) else ()):
            if isinstance(source, dict):
                absolute(source, "path", ("data", split, i, "path"), may_be_hub_id=False)
                absolute(source, "dataset", ("data", split, i, "dataset"), may_be_hub_id=True)


def _is_overridden(path: KeyPath, overridden: set[KeyPath]) -> bool:
    return any(path[: len(other)] == other for other in overridden)


def _problem(error: ErrorDetails, document: Document, overridden: set[KeyPath]) -> Problem:
    path = error["loc"]
    if error["type"] == "recipe":
        text = error["msg"]
    elif error["type"] == "extra_forbidden":
        text = suggest(path)
    elif error["type"] == "missing":
        text = f"required: {expectation(path)}"
    else:
        text = f"expected {expectation(path)}, got {show(error['input'])}"
    return Problem(_where(path, document, overridden), dotted(path), text)


def _where(path: KeyPath, document: Document, overridden: set[KeyPath]) -> str:
    if _is_overridden(path, overridden) or any(other[: len(path)] == path for other in overridden):
        return "override"
    while path not in document.lines and path:
        path = path[:-1]
    return f"line {document.lines.get(path, 1)}"


def _error(path: Path, problems: list[Problem]) -> RecipeError:
    def line(problem: Problem) -> int:
        return int(problem.where.removeprefix("line ")) if problem.where.startswith("line ") else 1 << 31

    problems = sorted(problems, key=line)
    width = max(len(problem.where) for problem in problems)
    lines = [
        f"{p.where:<{width}}  {p.key}: {p.text}" if p.key else f"{p.where:<{width}}  {p.text}"
        for p in problems
    ]
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    hint = "`tessera distill plan --schema` lists every key"
    return RecipeError(f"{path} has {count}", lines, hint=hint)


def _origins(recipe: Recipe, document: Document, overridden: set[KeyPath]) -> dict[str, Origin]:
    origins: dict[str, Origin] = {}

    def walk(value: Any, path: KeyPath) -> None:
        if isinstance(value, dict):
            for key, child in value.items():
                walk(child, (*path, key))
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for i, child in enumerate(value):
                walk(child, (*path, i))
        elif _is_overridden(path, overridden):
            origins[dotted(path)] = Origin("override")
        elif path in document.lines:
            origins[dotted(path)] = Origin("recipe", document.lines[path])
        else:
            origins[dotted(path)] = Origin("default")

    walk(recipe.model_dump(), ())
    return origins
