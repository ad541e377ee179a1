"""The licence that a model names itself, where it does."""

from pathlib import Path

import yaml

from tessera_cli.models.source import local_gguf


def licence_of(name: str, path: Path) -> str | None:
    """The licence of the model `name`, resolved to the directory `path`, by the hub's word for it.

    It is what the model's own card (README.md) or its GGUF file says, and None where neither says anything.
    """
    file = local_gguf(name)
    return _of_card(path / "README.md") if file is None else _of_gguf(file)


def _of_card(card: Path) -> str | None:
    try:
        text = card.read_text(encoding="utf-8")
        _, front, _ = text.split("---\n", 2)
        found = yaml.safe_load(front)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    licence = found.get("license") if isinstance(found, dict) else None
    return licence if isinstance(licence, str) else None


def _of_gguf(file: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(file).get_field("general.license")
    licence = None if field is None else field.contents()
    return licence if isinstance(licence, str) else None
