"""An engine of int8 weights keeps the engine's promises: a request's tokens are its own business."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.int8_weight import Int8Weight
from tessera_cli.kernels.backend import build_product, select_backend
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.linear_layers import ProductEmbedding, ProductLinear, replace_products
from tessera_cli.models.loader import load_int8_decoder
from tests.engines import Finished, greedy, make_engine, random_prompts, run_requests
from tests.unit.models.test_loader import TOKENS, logits

LENGTHS = [1, 2, 5, 17, 40, 63]


@pytest.fixture(params=["plain", "compiled"])
def decoder(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Decoder:
    """The tiny model in int8, by the plain or, where there is a library, by the compiled products."""
    decoder = load_int8_decoder(tiny_model_dir, dtype=torch.float32)
    if request.param == "compiled":
        compile_products(decoder)
    return decoder


def compile_products(decoder: Decoder) -> None:
    backend, reason = select_backend("auto", "cpu")
    if backend != "cpu":
        pytest.skip(reason)
    replace_products(decoder, partial(build_product, backend))


def requests_of(lengths: list[int]) -> dict[str, tuple[list[int], SamplingParams]]:
    return {str(i): (prompt, greedy(6 + i)) for i, prompt in enumerate(random_prompts(lengths))}


def tokens(outputs: Mapping[str, Finished]) -> dict[str, list[int]]:
    return {request_id: finished.token_ids for request_id, finished in outputs.items()}


def test_batched_equals_single(decoder: Decoder) -> None:
    requests = requests_of(LENGTHS)
    together = tokens(run_requests(make_engine(decoder), requests))
    for request_id, one in requests.items():
        alone = run_requests(make_engine(decoder), {request_id: one})
        assert together[request_id] == alone[request_id].token_ids
    assert len({tuple(generated[:3]) for generated in together.values()}) > 3


@pytest.mark.parametrize("max_num_batched_tokens", [1, 7])
def test_chunk_size_does_not_matter(decoder: Decoder, max_num_batched_tokens: int) -> None:
    requests = requests_of(LENGTHS)
    whole = run_requests(
        make_engine(decoder, max_num_batched_tokens=128, enable_chunked_prefill=False), requests
    )
    chunked = run_requests(make_engine(decoder, max_num_batched_tokens=max_num_batched_tokens), requests)
    assert tokens(chunked) == tokens(whole)


def test_preemption_does_not_change_greedy(decoder: Decoder) -> None:
    requests = {
        str(i): (prompt, greedy(16 + 3 * i)) for i, prompt in enumerate(random_prompts([7, 16, 3, 11]))
    }
    tight = make_engine(decoder, num_blocks=14, max_model_len=52)
    outputs = run_requests(tight, requests)
    assert tight.stats().num_preemptions > 0
    assert tokens(outputs) == tokens(run_requests(make_engine(decoder), requests))


def test_the_prefix_cache_changes_nothing(decoder: Decoder) -> None:
    shared, *ends = random_prompts([24, 3, 6, 9])
    cold, warm = {}, {}
    engine = make_engine(decoder)
    for index, end in enumerate(ends):
        one = {str(index): ([*shared, *end], greedy(8))}
        cold |= tokens(run_requests(make_engine(decoder, enable_prefix_caching=False), one))
        warm |= tokens(run_requests(engine, one))
    assert engine.stats().prefix_cache_hits == 2 * 24
    assert warm == cold


@pytest.mark.parametrize("model", ["tiny_model_dir", "tiny_untied_model_dir"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_products_are_the_plain_ones(
    model: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    decoder = load_int8_decoder(path, dtype=dtype)
    expected = logits(decoder, TOKENS)
    compile_products(decoder)
    # Activations keep 15 bits where all else does not round more.
    bound = 2e-3 if dtype is torch.float32 else 5e-2
    error = (logits(decoder, TOKENS) - expected).norm() / expected.norm()
    assert error < bound


def test_a_product_holds_the_only_copy_of_its_weight(tiny_model_dir: Path) -> None:
    decoder = load_int8_decoder(tiny_model_dir, dtype=torch.float32)
    built: list[Int8Weight] = []

    class Plain:
        def __init__(self, weight: Int8Weight) -> None:
            self.weight = weight
            built.append(weight)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.dequantise().T

        def rows(self, index: torch.Tensor) -> torch.Tensor:
            return self.weight.dequantise()[index]

    expected = logits(decoder, TOKENS)
    replace_products(decoder, Plain)
    torch.testing.assert_close(logits(decoder, TOKENS), expected, atol=1e-5, rtol=1e-5)
    assert len(built) == 4 * len(decoder.layers) + 1
    assert isinstance(decoder.embed_tokens, ProductEmbedding)
    assert isinstance(decoder.lm_head, ProductLinear)
    held = [*decoder.parameters(), *decoder.buffers()]
    assert all(tensor.dim() == 1 for tensor in held)
