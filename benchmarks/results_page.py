"""The page that benchmarks of quality write: each its own section, the others' left as they are."""

import os
import re
from pathlib import Path


def write_section(page: Path, heading: str, text: str) -> None:
    """Put `text` under `## heading` of `page`, in place of what stands there, else at its end."""
    old = page.read_text(encoding="utf-8") if page.exists() else "# Results\n"
    section = f"## {heading}\n\n{text.strip()}\n"
    found = re.search(rf"^## {re.escape(heading)}\n.*?(?=^## |\Z)", old, re.MULTILINE | re.DOTALL)
    if found is None:
        new = f"{old.rstrip()}\n\n{section}"
    else:
        after = old[found.end() :]
        new = old[: found.start()] + section + (f"\n{after}" if after else "")
    temporary = page.with_name(f".{page.name}.tmp")
    temporary.write_text(new, encoding="utf-8")
    os.replace(temporary, page)
