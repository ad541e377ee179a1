"""The harness gets from the engine what its own `hf` model gets from transformers."""

import json
import logging
import math
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import CapacityError, UsageError
from tessera_cli.serving.lm_eval_model import TesseraLM
from tessera_cli.serving.lm_eval_tasks import find_tasks, run_tasks

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness and what it imports have their own

MAX_MODEL_LEN = 64
FOX = "The quick brown fox jumps over the lazy dog."
PAIRS = [
    (FOX, " What is the capital"),
    (FOX, " Paris"),
    (FOX + " ", "a word"),  # the space goes to the continuation
    (FOX, "s and on"),  # the boundary is inside a word
    ("", "The capital of France"),
    ("", FOX),
    ("日本語と", "中文"),
    ("a", "b"),
    (FOX * 12, " What is the capital"),  # too long: its beginning is lost
    ("a", FOX * 2),
]


@pytest.fixture(scope="module")
def hf(tiny_model_dir: Path) -> HFLM:
    # Two ids fewer than the engine's: the last one that is scored, and the engine's own.
    return HFLM(str(tiny_model_dir), device="cpu", dtype="float32", max_length=MAX_MODEL_LEN - 2)


@pytest.fixture(scope="module")
def ours(tiny_model_dir: Path) -> TesseraLM:
    return TesseraLM(str(tiny_model_dir), device="cpu", max_model_len=MAX_MODEL_LEN, block_size=4)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")


def requests(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=index)  # type: ignore[arg-type]
        for index, one in enumerate(arguments)
    ]


def test_log_likelihoods_and_greediness_equal_those_of_transformers(hf: HFLM, ours: TesseraLM) -> None:
    wanted = hf.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    told = ours.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    assert [one[0] for one in told] == pytest.approx([one[0] for one in wanted], abs=2e-3, rel=1e-4)
    assert [one[1] for one in told] == [bool(one[1]) for one in wanted]


def test_a_continuation_is_greedy_up_to_its_first_other_token(hf: HFLM, ours: TesseraLM) -> None:
    context = ours.tok_encode(FOX)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    (output,) = ours._llm.generate([context], params)
    greedy = output.outputs[0].token_ids
    other = [*greedy[:-1], greedy[-1] ^ 1]
    scored = [(None, context, ids) for ids in (greedy, greedy[:1], other, other[:-1])]
    wanted = hf._loglikelihood_tokens(scored, disable_tqdm=True)
    told = ours._loglikelihood_tokens(scored, disable_tqdm=True)
    assert [one[1] for one in told] == [bool(one[1]) for one in wanted] == [True, True, False, True]
    assert [one[0] for one in told] == pytest.approx([one[0] for one in wanted], abs=2e-3, rel=1e-4)


def test_a_context_that_is_shared_is_computed_once(tiny_model_dir: Path, hf: HFLM) -> None:
    model = TesseraLM(str(tiny_model_dir), device="cpu", max_model_len=MAX_MODEL_LEN, block_size=4)
    pairs = [(context, f" {choice}") for context in (FOX, FOX[::-1]) for choice in ("Paris", "a", "robot")]
    told = model.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    wanted = hf.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    assert [one[0] for one in told] == pytest.approx([one[0] for one in wanted], abs=2e-3, rel=1e-4)
    contexts = [len(model.tok_encode(context)) for context in (FOX, FOX[::-1])]
    # The last token of a context predicts the first of what follows, so its block may have to be computed.
    least = 2 * sum((length - 1) // 4 * 4 for length in contexts)
    assert model._llm.engine.stats().prefix_cache_hits >= least


@pytest.mark.parametrize("text", ["a", FOX, FOX * 9], ids=["one token", "one window", "windows"])
def test_rolling_log_likelihoods_equal_those_of_transformers(hf: HFLM, ours: TesseraLM, text: str) -> None:
    (wanted,) = hf.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    (told,) = ours.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    assert told == pytest.approx(wanted, abs=2e-3, rel=1e-4)
    assert told < 0


def test_answers_equal_those_of_transformers(hf: HFLM, ours: TesseraLM) -> None:
    (free,) = hf.generate_until(requests("generate_until", [(FOX, {"until": [], "max_gen_toks": 24})]))
    stop = free[len(free) // 2 :][:2]
    kwargs = [
        {"until": [], "max_gen_toks": 24},
        {"until": [stop], "max_gen_toks": 24},
        {"until": stop, "max_gen_toks": 24, "do_sample": False, "temperature": 0.0},
        {"until": ["no such text"], "max_gen_toks": 3},
    ]
    arguments = [(FOX, one) for one in kwargs] + [("The capital", {"until": [], "max_gen_toks": 9})]
    wanted = hf.generate_until(requests("generate_until", arguments), disable_tqdm=True)
    assert ours.generate_until(requests("generate_until", arguments), disable_tqdm=True) == wanted
    assert wanted[1] != wanted[0]
    assert wanted[0].startswith(wanted[1])


def test_what_is_cut_is_said(ours: TesseraLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ours.loglikelihood(requests("loglikelihood", [(FOX, " a")]), disable_tqdm=True)
        assert not caplog.records
        ours.loglikelihood(requests("loglikelihood", [(FOX * 12, " a")]), disable_tqdm=True)
        ours.generate_until(
            requests("generate_until", [(FOX * 12, {"until": [], "max_gen_toks": 8})]), disable_tqdm=True
        )
    length = len(ours.tok_encode(FOX * 12))
    losses = [length + 1 - (MAX_MODEL_LEN - 1), length - (MAX_MODEL_LEN - 8)]
    assert [record.args[1] for record in caplog.records] == losses  # type: ignore[index]


def test_what_cannot_be_is_refused(ours: TesseraLM, tiny_model_dir: Path) -> None:
    with pytest.raises(UsageError, match="no option max_model_length"):
        TesseraLM(str(tiny_model_dir), max_model_length=64)
    with pytest.raises(CapacityError, match="a continuation of"):
        ours.loglikelihood(requests("loglikelihood", [("a", FOX * 12)]), disable_tqdm=True)
    with pytest.raises(CapacityError, match="no room for a prompt"):
        ours.generate_until(requests("generate_until", [("a", {"max_gen_toks": 64})]), disable_tqdm=True)
    with pytest.raises(UsageError, match="num_beams"):
        ours.generate_until(requests("generate_until", [("a", {"num_beams": 4})]), disable_tqdm=True)


def test_conversations_are_rendered_as_transformers_does(hf: HFLM, ours: TesseraLM) -> None:
    turns = [{"role": "user", "content": "Hello?"}]
    assert ours.apply_chat_template(turns) == hf.apply_chat_template(turns)
    turns.append({"role": "assistant", "content": "The answer is"})
    assert ours.apply_chat_template(turns, False) == hf.apply_chat_template(turns, False)
    assert ours.chat_template(True) == hf.chat_template(True)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A task of choices and one of answers, on data that lie beside them."""
    rows = [
        {"question": "The quick brown fox", "choices": [" jumps over", " learns from"], "answer": 0},
        {"question": "The capital of France", "choices": [" is a robot", " is Paris"], "answer": 1},
        {"question": "A small student", "choices": [" learns from", " jumps over"], "answer": 0},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "rows.jsonl"}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
    (tmp_path / "choices.yaml").write_text(
        f"task: tiny_choices\noutput_type: multiple_choice{common}"
        'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    (tmp_path / "answers.yaml").write_text(
        f"task: tiny_answers\noutput_type: generate_until{common}"
        'doc_to_target: "{{choices[answer]}}"\ngeneration_kwargs: {until: ["."], max_gen_toks: 4}\n'
        "metric_list: [{metric: exact_match}]\n"
    )
    return tmp_path


def test_a_task_has_the_figures_that_transformers_gives_it(
    tasks: Path, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval import simple_evaluate

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    # The harness would list every installed package, for seconds.
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    names = ["tiny_choices", "tiny_answers"]
    manager = find_tasks(names, tasks)
    told = run_tasks(tiny_model_dir, names, manager, limit=None, device="cpu")
    wanted = simple_evaluate(
        model=HFLM(str(tiny_model_dir), device="cpu", dtype="float32"),
        tasks=names,
        task_manager=manager,
    )["results"]
    for task, metrics in (("tiny_choices", ("acc", "acc_norm")), ("tiny_answers", ("exact_match",))):
        for metric in metrics:
            assert told[task][metric] == wanted[task][f"{metric},none"]
            assert math.isfinite(told[task][f"{metric}_stderr"])
    limited = run_tasks(tiny_model_dir, names[:1], manager, limit=1, device="cpu")
    assert limited["tiny_choices"]["acc"] in (0.0, 1.0)


@pytest.mark.slow
def test_an_unknown_task_is_refused_before_any_work(tasks: Path) -> None:
    with pytest.raises(UsageError, match="no such directory"):
        find_tasks(["tiny_choices"], tasks / "missing")
    with pytest.raises(UsageError, match="no such task: tiny_choice_"):
        find_tasks(["tiny_choices", "hellaswag", "tiny_choice_"], tasks)


def test_a_task_whose_documents_cannot_be_had_is_refused_before_any_work(
    tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(UsageError, match="tiny_choices cannot be loaded: FileNotFoundError"):
        find_tasks(["tiny_choices"], tasks)
