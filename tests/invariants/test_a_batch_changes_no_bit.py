"""With compiled kernels a request's log-probabilities have the same bits alone and among others."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.kernels.backend import build_product, select_backend
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.linear_layers import ProductEmbedding, ProductLinear, replace_products
from tessera_cli.models.loader import load_int8_decoder
from tests.engines import Finished, make_engine, random_prompts, run_requests, tiny_decoder
from tests.unit.models.test_loader import TOKENS, logits

_PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)


@pytest.mark.parametrize("weights", ["float32", "int8"])
@pytest.mark.parametrize("model", ["tiny_model_dir", "tiny_untied_model_dir"])
def test_neither_batch_nor_threads_change_a_bit(
    weights: str, model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request.getfixturevalue(model)
    decoder = tiny_decoder(path) if weights == "float32" else load_int8_decoder(path, dtype=torch.float32)
    _compile_products(decoder)
    requests = {
        str(i): (prompt, replace(_PARAMS, max_tokens=4 + 5 * i))
        for i, prompt in enumerate(random_prompts([1, 30, 13, 5, 2, 12]))
    }
    together = run_requests(_engine(decoder), requests)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for request_id, one in requests.items():
        assert _told(run_requests(_engine(decoder), {request_id: one})[request_id]) == _told(
            together[request_id]
        )


@pytest.mark.parametrize("model", ["tiny_model_dir", "tiny_untied_model_dir"])
def test_compiled_float32_products_are_the_plain_ones_and_hold_the_only_copy(
    model: str, request: pytest.FixtureRequest
) -> None:
    decoder = tiny_decoder(request.getfixturevalue(model))
    expected = logits(decoder, TOKENS)
    _compile_products(decoder)
    torch.testing.assert_close(logits(decoder, TOKENS), expected, atol=1e-5, rtol=1e-5)
    assert isinstance(decoder.lm_head, ProductLinear)
    is_tied = decoder.config.tie_word_embeddings
    assert isinstance(decoder.embed_tokens, ProductEmbedding) == is_tied
    matrices = [tensor for tensor in decoder.parameters() if tensor.dim() > 1]
    assert len(matrices) == (not is_tied)


def test_weights_of_16_bits_stay_as_they_are(tiny_model_dir: Path) -> None:
    decoder = tiny_decoder(tiny_model_dir).to(torch.bfloat16)
    before = dict(decoder.named_modules())
    _compile_products(decoder)
    assert dict(decoder.named_modules()) == before


def _compile_products(decoder: Decoder) -> None:
    backend, reason = select_backend("auto", "cpu")
    if backend != "cpu":
        pytest.skip(reason)
    replace_products(decoder, partial(build_product, backend))


def _engine(decoder: Decoder):
    return make_engine(decoder, block_size=8, num_blocks=100)


def _told(finished: Finished) -> tuple[object, ...]:
    return finished.token_ids, finished.logprobs, finished.prompt_logprobs
