"""Files that appear whole or not at all."""

import os
from pathlib import Path


def write_file(path: Path, text: str) -> None:
    """Write `text` in UTF-8 so that `path` has all of it or is untouched."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
