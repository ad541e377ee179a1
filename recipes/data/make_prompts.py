"""Deal the quick start's prompts from `prompts.toml`, always the same ones.

    python recipes/data/make_prompts.py            writes prompts.jsonl beside this file
    python recipes/data/make_prompts.py --check    exits 1 if prompts.jsonl is not what would be written

Line i of prompts.jsonl belongs to category ``i % len(categories)``: categories take turns, so that any first
part of the file is as varied as the whole.
"""

import argparse
import hashlib
import itertools
import json
import os
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROMPTS_PER_CATEGORY = 40
SEED = 0


@dataclass(frozen=True)
class Prompt:
    """A user's message; `number` counts within its category, `template` is what it was made from."""

    category: str
    number: int
    template: str
    text: str

    @property
    def id(self) -> str:
        """Such as ``story-07``."""
        return f"{self.category}-{self.number:02d}"


def make_prompts(material: Path = HERE / "prompts.toml") -> list[Prompt]:
    """All prompts in file order.

    Raises:
        ValueError: a category has too little material, or two prompts are equal.
    """
    groups = tomllib.loads(material.read_text(encoding="utf-8"))["group"]
    categories = list(dict.fromkeys(group["category"] for group in groups))
    dealt = [_deal(name, [group for group in groups if group["category"] == name]) for name in categories]
    prompts = [prompt for turn in zip(*dealt, strict=True) for prompt in turn]
    repeated = [text for text, count in Counter(prompt.text for prompt in prompts).items() if count > 1]
    if repeated:
        raise ValueError(f"{material}: made more than once: {repeated}")
    return prompts


def _deal(category: str, groups: list[dict[str, Any]]) -> list[Prompt]:
    """Draw pairs of template and topic, each time of the topics used least the templates used least.

    Ties are broken by a digest, which is the same on every machine and every version of Python.
    """
    pairs = [pair for group in groups for pair in itertools.product(group["templates"], group["topics"])]
    pairs.sort(key=lambda pair: hashlib.sha256(f"{SEED}\n{pair[0]}\n{pair[1]}".encode()).digest())
    used: Counter[str] = Counter()
    prompts = []
    for number in range(PROMPTS_PER_CATEGORY):
        if not pairs:
            raise ValueError(f"category {category}: fewer than {PROMPTS_PER_CATEGORY} prompts can be made")
        template, topic = min(pairs, key=lambda pair: (used[pair[1]], used[pair[0]]))
        pairs.remove((template, topic))
        used.update((template, topic))
        prompts.append(Prompt(category, number, template, template.format(*topic.split("|"))))
    return prompts


def to_jsonl(prompts: list[Prompt]) -> str:
    """One ``{"prompt": ...}`` a line: what `tessera generate --prompt-file` reads."""
    return "".join(json.dumps({"prompt": prompt.text}, ensure_ascii=False) + "\n" for prompt in prompts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write prompts.jsonl from prompts.toml.")
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if prompts.jsonl differs")
    check = parser.parse_args().check
    target = HERE / "prompts.jsonl"
    prompts = make_prompts()
    text = to_jsonl(prompts)
    if check:
        same = target.is_file() and target.read_bytes() == text.encode()
        print(f"{target.name}: {'up to date' if same else 'differs from prompts.toml'}", file=sys.stderr)
        return 0 if same else 1
    partial = target.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, target)
    print(f"{target.name}: {len(prompts)} prompts", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
