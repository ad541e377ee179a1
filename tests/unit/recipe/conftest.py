from collections.abc import Callable
from pathlib import Path

import pytest

SOUND = """\
name: tiny
teacher:
  model: org/teacher
student:
  num_hidden_layers: 2
data:
  train: [{path: train.jsonl, format: text}]
  eval: [{path: eval.jsonl, format: text}]
train:
  max_steps: 10
"""


@pytest.fixture
def sound() -> str:
    """The text of the shortest recipe; a test adds to it or replaces in it."""
    return SOUND


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a recipe file of this text."""

    def write(text: str) -> Path:
        path = tmp_path / "tiny.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write
