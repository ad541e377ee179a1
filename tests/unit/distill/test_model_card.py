"""The model card says what the hub reads, and invents nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tessera_cli.distill.evaluation.model_card import render_card
from tessera_cli.distill.evaluation.report import Report
from tests.unit.distill.test_html_report import make_report


def front_matter(card: str) -> dict[str, Any]:
    start, front, _ = card.split("---\n", 2)
    assert start == ""
    return yaml.safe_load(front)


def of_teacher(report: Report, model: str) -> Report:
    teacher = report.recipe.teacher.model_copy(update={"model": model})
    return replace(report, recipe=report.recipe.model_copy(update={"teacher": teacher}))


@pytest.fixture
def report() -> Report:
    return make_report(["answer"])


def test_a_teacher_of_the_hub_is_the_base_model(report: Report, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\nbase_model: other/model\n---\n# A teacher\n")
    front = front_matter(render_card(report, teacher_path=tmp_path, is_chat=True))
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "org/teacher",
        "license": "mit",
        "tags": ["distillation", "tessera"],
    }


@pytest.mark.parametrize("model", ["./models/big", "/models/big", "big", "~/models/big"])
def test_a_directory_is_no_name_that_the_hub_knows(report: Report, model: str, tmp_path: Path) -> None:
    card = render_card(of_teacher(report, model), teacher_path=tmp_path, is_chat=True)
    assert "base_model" not in front_matter(card)


@pytest.mark.parametrize(
    "readme",
    [None, "", "# No front matter\n", "---\ntags: [a]\n---\n", "---\n[broken\n---\n", "---\nmit\n---\n"],
)
def test_a_licence_that_is_not_stated_is_not_invented(
    report: Report, readme: str | None, tmp_path: Path
) -> None:
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    card = render_card(report, teacher_path=tmp_path, is_chat=True)
    assert "license" not in front_matter(card)
    assert "licence is not known" in card


def test_the_card_has_figures_recipe_and_both_ways_to_run_it(report: Report, tmp_path: Path) -> None:
    card = render_card(report, teacher_path=tmp_path, is_chat=True)
    assert "| KL to the teacher | 2.0000 | 0.5000 | 0 |" in card
    assert f"```yaml\n{report.provenance.recipe}```" in card
    assert 'tessera generate ./tiny -p "Hello"' in card
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert "apply_chat_template" in code
    plain = render_card(report, teacher_path=tmp_path, is_chat=False)
    code = plain.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert "apply_chat_template" not in code


def test_nothing_in_a_recipe_closes_its_fence(report: Report, tmp_path: Path) -> None:
    hostile = replace(report.provenance, recipe="name: '````'\n```\n# free\n")
    card = render_card(replace(report, provenance=hostile), teacher_path=tmp_path, is_chat=True)
    assert "`````yaml\nname: '````'\n```\n# free\n`````" in card
