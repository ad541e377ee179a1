"""`tessera quantize`, and `--quantization` of the commands that run models."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.families import write_family

from tessera_cli.cli.app import run
from tessera_cli.cli.loading import LoadedModel
from tessera_cli.errors import ExitCode

ENGINE = ["--num-blocks", "128", "--max-num-seqs", "8", "--device", "cpu"]
GENERATE = ["-p", "Pages of keys", "-p", "The quick", "--max-tokens", "12", "--ignore-eos"]
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    rows = [{"text": f"A small student learns from {i} large teachers, a token at a time."} for i in range(9)]
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def int8_dir(tiny_model_dir: Path, tmp_path: Path, capsys: Capsys) -> Path:
    assert run(["quantize", str(tiny_model_dir), str(tmp_path / "int8")]) == ExitCode.SUCCESS
    capsys.readouterr()
    return tmp_path / "int8"


def generated(capsys: Capsys, *arguments: str) -> list[str]:
    assert run(["generate", *ENGINE, *GENERATE, *arguments]) == ExitCode.SUCCESS
    return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]


def test_tells_the_sizes_and_what_int8_costs(
    tiny_model_dir: Path, documents: Path, tmp_path: Path, capsys: Capsys
) -> None:
    out = str(tmp_path / "int8")
    arguments = ["--eval", str(documents), "--eval-format", "text", "--eval-tokens", "100"]
    assert run(["quantize", str(tiny_model_dir), out, *arguments]) == ExitCode.SUCCESS
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].split() == ["original", "int8"]
    assert [line.split("  ")[0] for line in lines[1:]] == [
        "weights",
        "perplexity",
        "KL(float32‖int8), nats/token",
        "top-1 agreement",
        "tokens measured",
    ]
    assert max(map(len, lines)) <= 80
    assert shown.err.splitlines()[-1] == f"wrote {out}"
    assert (
        run(["quantize", str(tiny_model_dir), out, *arguments, "--overwrite", "--json"]) == ExitCode.SUCCESS
    )
    document = json.loads(capsys.readouterr().out)
    assert document["int8_bytes"] < document["source_bytes"]
    evaluation = document["evaluation"]
    assert 0 < evaluation["kl"] < 0.05
    assert 0.8 < evaluation["top1_agreement"] <= 1
    assert evaluation["int8_perplexity"] == pytest.approx(evaluation["float32_perplexity"], rel=0.05)
    assert 0 < evaluation["num_tokens"] <= 100


def test_a_quantised_directory_answers_as_quantising_while_loading_does(
    tiny_model_dir: Path, int8_dir: Path, capsys: Capsys
) -> None:
    assert generated(capsys, str(int8_dir)) == generated(
        capsys, str(tiny_model_dir), "--quantization", "int8"
    )


def test_the_quantisation_is_named_where_the_dtype_is(int8_dir: Path, capsys: Capsys) -> None:
    load = ["--concurrency", "1", "--num-prompts", "1", "--input-len", "4", "--output-len", "2", "--json"]
    assert run(["bench", str(int8_dir), *ENGINE, *load]) == ExitCode.SUCCESS
    shown = capsys.readouterr()
    assert json.loads(shown.out)["config"]["quantization"] == "int8"
    assert "float32 on cpu, int8 weights" in shown.err
    config: Any = None
    model = LoadedModel("student", int8_dir, config, config, "float32", "int8", "cpu", "cpu")
    assert model.title("bench") == ["tessera bench", "student", "cpu float32 int8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["generate", "{int8}", "-p", "x", "--quantization", "none"],
            "is quantised to int8 and cannot run without",
        ),
        (["generate", "{plain}", "-p", "x", "--quantization", "int4"], "'int4' is not a quantisation"),
        (["generate", "{gpt2}", "-p", "x", "--quantization", "int8"], "runs through transformers"),
        (["quantize", "{int8}", "{new}"], "is quantised to int8, which is for serving only"),
        (["quantize", "{gpt2}", "{new}"], "is not native"),
        (["quantize", "{plain}", "{int8}"], "is not empty"),
        (["quantize", "{plain}", "{plain}", "--overwrite"], "is the model itself"),
        (["quantize", "{plain}", "{new}", "--eval", "{new}.jsonl"], "no such data file"),
        (["quantize", "{plain}", "{new}", "--eval-tokens", "7"], "are of --eval"),
        (["quantize", "{plain}", "{new}", "--eval", "{documents}"], "has no column 'messages'"),
        (["quantize", "{new}", "{new}2"], "no such model"),
    ],
    ids=lambda value: " ".join(value).replace("{", "").replace("}", "") if isinstance(value, list) else "-",
)
def test_what_cannot_be_done_is_told_before_anything_is_written(
    arguments: list[str],
    message: str,
    tiny_model_dir: Path,
    int8_dir: Path,
    documents: Path,
    tmp_path: Path,
    capsys: Capsys,
) -> None:
    if "{gpt2}" in arguments:
        write_family("gpt2", tmp_path / "gpt2")
    names = {"plain": tiny_model_dir, "int8": int8_dir, "documents": documents, "gpt2": tmp_path / "gpt2"}
    before = sorted(path.name for path in tmp_path.iterdir())
    code = run([argument.format(new=tmp_path / "new", **names) for argument in arguments])
    shown = capsys.readouterr()
    assert code == ExitCode.USAGE
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before
