"""report.html tells what report.md tells, fetches nothing, and holds no markup but its own."""

import dataclasses
from html.parser import HTMLParser
from typing import Any

import pytest

from tessera_cli.distill.evaluation.html_report import render_html
from tessera_cli.distill.evaluation.provenance import Provenance
from tessera_cli.distill.evaluation.report import Report, render_report
from tessera_cli.distill.evaluation.samples import Comparison, Sample
from tessera_cli.distill.events import Evaluated, TrainStep
from tessera_cli.models.config import ModelConfig
from tessera_cli.recipe.loader import dump_recipe
from tessera_cli.recipe.schema import Recipe

HOSTILE = [
    "<script>alert(1)</script>",
    "</div></main><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "<!-- ",
    "&lt;b&gt; 'quotes' \"double\"",
    "\x00\x1b[31m red \x7f",
]


def filled(kind: type, **values: Any) -> Any:
    return kind(**{field.name: 1.0 for field in dataclasses.fields(kind)} | values)


def make_report(texts: list[str], *, notes: tuple[str, ...] = (), num_speed_prompts: int = 16) -> Report:
    source = {"path": "a.jsonl", "format": "messages"}
    recipe = Recipe.model_validate(
        {
            "name": "tiny",
            "teacher": {"model": "org/teacher"},
            "student": {"layers": [0, 2]},
            "data": {"train": [source], "eval": [source]},
            "train": {"max_steps": 3},
        }
    )
    config = ModelConfig(
        **{"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-5},
        **{"rope_theta": 1e4, "max_position_embeddings": 64, "tie_word_embeddings": True},
        **{"bos_token_id": None, "eos_token_ids": (2,), "pad_token_id": None, "dtype": "float32"},
    )
    steps = [filled(TrainStep, step=i, tokens=100 * i, supervised_tokens=60 * i) for i in (1, 2, 3)]
    evaluations = [filled(Evaluated, step=i, num_tokens=500, kl=2.0 - i / 2) for i in (0, 3)]
    provenance = Provenance(
        started="2026-01-02 03:04:05 UTC",
        wall_seconds=3725.0,
        training_seconds=65.0,
        seed=11,
        machine="Linux, 2 CPUs",
        versions={"tessera": "0.1", "torch": "2"},
        fingerprints={"teacher": "ab" * 32},
        recipe=dump_recipe(recipe),
    )
    return Report(
        recipe=recipe,
        teacher=config,
        student=config,
        layers=(0, 2),
        train_steps=steps,
        evaluations=evaluations,
        end=evaluations[-1],
        comparison=Comparison(tuple(Sample(t, t, t) for t in texts), num_speed_prompts, 100.0, 250.0),
        notes=notes,
        provenance=provenance,
    )


class Page(HTMLParser):
    """The elements of a page, and the text between them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_models_and_documents_say_is_shown_and_never_markup(text: str) -> None:
    plain = Page(render_html(make_report(["harmless"], notes=("harmless",))))
    hostile = Page(render_html(make_report([text], notes=(text,))))
    assert hostile.tags == plain.tags
    shown = text.translate(dict.fromkeys((0, 27, 127), "\ufffd"))
    assert hostile.text.count(shown) == 4  # prompt, both answers, note
    assert not any(character in "".join(hostile.text) for character in "\x00\x1b\x7f")


def test_the_page_fetches_nothing_and_runs_nothing() -> None:
    page = Page(render_html(make_report(["answer"])))
    assert not {"script", "img", "link", "iframe", "object", "image"} & {tag for tag, _ in page.tags}
    for _, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "action"):
                assert (value or "").startswith("#")
            assert "url(http" not in (value or "")
    assert "@import" not in "".join(page.text)
    policy = next(attributes for tag, attributes in page.tags if "http-equiv" in attributes)
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_the_page_has_every_figure_of_the_markdown_and_where_they_come_from() -> None:
    report = make_report(["an answer"])
    text = " ".join(Page(render_html(report)).text)
    for line in render_report(report).splitlines():
        if line.startswith("| ") and "---" not in line and "an answer" not in line:
            assert all(cell.strip() in text for cell in line.strip("|").split("|"))
    told = report.provenance
    for fact in (told.started, "1:02:05", "0:01:05", "11", told.machine, "torch 2", "ab" * 32, told.recipe):
        assert fact in text


def test_the_same_run_makes_the_same_page_with_an_id_for_each_thing() -> None:
    source = render_html(make_report(["answer"]))
    assert source == render_html(make_report(["answer"]))
    assert source.count("<svg") == 4
    ids = [attributes["id"] for _, attributes in Page(source).tags if "id" in attributes]
    defined = [one for one in ids if one is not None and not one.startswith(("figure_", "axes_", "line2d_"))]
    paths = [one for one in defined if one[0] in "mp" and len(one) == 11]
    assert paths
    assert len(set(paths)) == len(paths)


def test_a_run_without_answers_says_so() -> None:
    page = " ".join(Page(render_html(make_report([], num_speed_prompts=0))).text)
    assert "neither speed nor answers" in page
    assert "Answers" not in page
