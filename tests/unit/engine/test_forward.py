"""The compiled call through all layers equals its layers one by one, to the bit, wherever it is taken."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tessera_cli.engine import forward
from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.kernels.backend import build_product, select_backend
from tessera_cli.kernels.cpu_decoder import CpuDecoder
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.linear_layers import replace_products
from tessera_cli.models.loader import load_decoder, load_int8_decoder
from tests.engines import make_engine, random_prompts, run_requests, tiny_decoder
from tests.families import NATIVE, VOCAB_SIZE, write_family

_PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
# What has other steps in a layer: norms of queries and keys, norms behind the blocks, a scaled residual.
_LAYER_BY_LAYER = {"qwen3", "qwen3-windows", "olmo2", "olmo3", "granite"}


@pytest.fixture(autouse=True)
def _compiled_kernels() -> None:
    backend, reason = select_backend("auto", "cpu")
    if backend != "cpu":
        pytest.skip(reason)


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("name", NATIVE)
def test_at_once_equals_layer_by_layer(
    name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_family(name, tmp_path)
    load = load_decoder if weights == "float32" else load_int8_decoder
    decoder = _with_compiled_products(load(path, dtype=torch.float32))
    at_once = _engine(decoder)
    assert _is_at_once(at_once) == (name not in _LAYER_BY_LAYER)
    monkeypatch.setattr(forward, "_compiled_layers", lambda *_: None)
    assert _told(at_once) == _told(_engine(decoder))


def test_a_decoder_with_weights_of_its_own_goes_layer_by_layer(tiny_model_dir: Path) -> None:
    decoder = tiny_decoder(tiny_model_dir)
    assert not _is_at_once(_engine(decoder))
    _with_compiled_products(decoder)
    assert _is_at_once(_engine(decoder))
    assert not _is_at_once(_engine(decoder, attention_backend="reference"))
    assert not _is_at_once(_engine(decoder.to(torch.bfloat16)))


@pytest.mark.parametrize(("hidden", "inner"), [(36, 96), (64, 100), (1, 1)])
def test_widths_that_the_library_lacks_go_layer_by_layer(
    hidden: int, inner: int, tiny_model_dir: Path
) -> None:
    config = replace(ModelConfig.from_dir(tiny_model_dir), hidden_size=hidden, intermediate_size=inner)
    decoder = Decoder(config).eval()
    plain = _told(_engine(decoder, attention_backend="reference"))
    engine = _engine(_with_compiled_products(decoder))
    assert not _is_at_once(engine)
    assert [told[0] for told in _told(engine)] == [told[0] for told in plain]


def _with_compiled_products(decoder: Decoder) -> Decoder:
    replace_products(decoder, partial(build_product, "cpu"))
    return decoder


def _engine(decoder: Decoder, *, attention_backend: str = "cpu") -> Engine:
    """One that computes chunks beside decodes."""
    sizes = {"block_size": 8, "num_blocks": 100, "max_num_batched_tokens": 19}
    return make_engine(decoder, options={"attention_backend": attention_backend}, **sizes)


def _is_at_once(engine: Engine) -> bool:
    return any(isinstance(part, CpuDecoder) for part in engine._runner._forward.args)


def _told(engine: Engine) -> list[tuple[object, ...]]:
    prompts = [[token % VOCAB_SIZE for token in prompt] for prompt in random_prompts([1, 30, 13, 5, 2, 12])]
    finished = run_requests(engine, {str(i): (prompt, _PARAMS) for i, prompt in enumerate(prompts)})
    return [(one.token_ids, one.logprobs, one.prompt_logprobs) for one in finished.values()]
