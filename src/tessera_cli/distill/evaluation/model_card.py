"""The README.md of an export: what the Hugging Face hub reads of a model, and what its users want to know."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tessera_cli.distill.evaluation.report import (
    FIGURES_EXPLAINED,
    Report,
    figure_header,
    figure_rows,
    markdown_table,
    summary,
)
from tessera_cli.models.licence import licence_of
from tessera_cli.recipe.schema import Recipe

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def render_card(report: Report, *, teacher_path: Path, is_chat: bool) -> str:
    """The card as Markdown behind YAML front matter.

    `teacher_path` is where the teacher's own card is looked for; a licence that is not found is not made up.
    `is_chat` says whether the model has a chat template.
    """
    licence = licence_of(report.recipe.teacher.model, teacher_path)
    front = yaml.safe_dump(_front_matter(report.recipe, licence), sort_keys=False, allow_unicode=True)
    name, fence = report.recipe.name, _fence(report.provenance.recipe)
    sections = [
        f"---\n{front}---",
        f"# {name}",
        summary(report, code="`"),
        "## Figures",
        markdown_table(figure_header(report), figure_rows(report)),
        FIGURES_EXPLAINED,
        "## Use",
        f'```bash\ntessera generate ./{name} -p "Hello"\n```',
        f"```python\n{_python(name, is_chat=is_chat)}```",
        "## Recipe",
        f"{fence}yaml\n{report.provenance.recipe}{fence}",
        "## Licence",
        _licence_note(licence),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(recipe: Recipe, licence: str | None) -> dict[str, Any]:
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    # A directory or file of this machine is no name that the hub knows.
    if _is_hub_id(recipe.teacher.model):
        front["base_model"] = recipe.teacher.model
    if licence is not None:
        front["license"] = licence
    datasets = _hub_ids(source.dataset for source in recipe.data.train)
    if datasets:
        front["datasets"] = datasets
    return front | {"tags": ["distillation", "tessera"]}


def _hub_ids(names: Iterable[str | None]) -> list[str]:
    return sorted({name for name in names if name is not None and _is_hub_id(name)})


def _is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def _python(name: str, *, is_chat: bool) -> str:
    load = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("./{name}")\n'
        f'tokenizer = AutoTokenizer.from_pretrained("./{name}")\n'
    )
    prompt = (
        'inputs = tokenizer.apply_chat_template(\n    [{"role": "user", "content": "Hello"}],\n'
        '    add_generation_prompt=True,\n    return_dict=True,\n    return_tensors="pt",\n)\n'
        if is_chat
        else 'inputs = tokenizer("Hello", return_tensors="pt")\n'
    )
    answer = "output = model.generate(**inputs, max_new_tokens=64)\nprint(tokenizer.decode(output[0]))\n"
    return load + prompt + answer


def _fence(text: str) -> str:
    """A fence that nothing in `text` closes."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(3, longest + 1)


def _licence_note(licence: str | None) -> str:
    if licence is None:
        return (
            "The teacher's licence is not known to the program that wrote this. A student is made from its "
            "teacher's weights and answers: find that licence, and what the documents allow, before you pass "
            "this model on."
        )
    return f"The teacher is under `{licence}`; what the training documents allow is to be added to that."
