import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tessera_cli.cli.loading import LoadedModel, load_model
from tessera_cli.cli.output import Output
from tessera_cli.errors import ModelError
from tessera_cli.settings import Settings

Load = Callable[[Path], LoadedModel]


@pytest.fixture
def load() -> Iterator[Load]:
    """Loads a model as the commands do; afterwards the collector sees again what it saw before."""
    yield lambda path: load_model(
        str(path),
        Settings.from_env({}),
        Output.of(quiet=True),
        offline=True,
        engine={"num_blocks": 8, "max_model_len": 64, "device": "cpu"},
    )
    gc.unfreeze()


def test_the_garbage_collector_leaves_what_is_loaded_alone_then_and_later(
    tiny_model_dir: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tessera_cli.serving import llm

    collects: list[bool] = []

    def load_engine(*args, **options):
        collects.append(gc.isenabled())
        return wrapped(*args, **options)

    wrapped = llm.load_engine
    monkeypatch.setattr(llm, "load_engine", load_engine)
    model = load(tiny_model_dir)
    assert collects == [False]
    assert gc.isenabled()
    assert all(model.llm is not seen for seen in gc.get_objects())


def test_the_garbage_collector_works_again_after_a_model_that_cannot_be_loaded(
    tiny_model_dir: Path, tmp_path: Path, load: Load
) -> None:
    path = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is damaged"):
        load(path)
    assert gc.isenabled()
