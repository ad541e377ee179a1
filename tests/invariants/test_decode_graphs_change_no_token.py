"""Decode steps through captured graphs give the tokens that they give kernel by kernel."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tessera_cli.engine import model_runner
from tessera_cli.engine.model_runner import ModelRunner
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.kernels import cuda
from tessera_cli.kernels.cuda_plan import layer_kernels
from tessera_cli.models.decoder import Decoder
from tests.cuda_shim.build import COMPILER, ShimKernels, build
from tests.engines import add_requests, greedy, make_engine, random_prompts, run_samples, tiny_decoder
from tests.recorder import Recorder, engine_with_graphs

REFERENCE = {"attention_backend": "reference"}


@pytest.fixture(scope="module")
def decoder(tiny_model_dir: Path) -> Decoder:
    return tiny_decoder(tiny_model_dir)


SAMPLED = SamplingParams(seed=7, max_tokens=20, ignore_eos=True, temperature=1.5, logprobs=2)


@pytest.mark.parametrize("num_blocks", [200, 34], ids=["roomy", "preempting"])
def test_an_engine_gives_the_same_tokens_with_and_without_graphs(decoder: Decoder, num_blocks: int) -> None:
    prompts = random_prompts([5, 9, 30, 1, 17, 9, 40, 3, 2])
    prompts[5] = [*prompts[1], 7]  # a prefix that is found
    params = [greedy(9), SAMPLED, greedy(40), replace(SAMPLED, n=3), greedy(1), SAMPLED, greedy(17)]
    requests = {str(index): (prompt, params[index % len(params)]) for index, prompt in enumerate(prompts)}
    plain = make_engine(decoder, options=REFERENCE, num_blocks=num_blocks)
    engine, recorder = engine_with_graphs(decoder, num_blocks=num_blocks)
    results = []
    for each in (plain, engine):
        add_requests(each, requests)
        results.append(run_samples(each))
    for request_id, samples in results[0].items():
        for sample, other in zip(samples, results[1][request_id], strict=True):
            assert sample.token_ids == other.token_ids
            assert [x.logprob for x in sample.logprobs] == pytest.approx(
                [x.logprob for x in other.logprobs], abs=1e-4
            )
    assert plain.stats().num_preemptions == engine.stats().num_preemptions
    assert bool(engine.stats().num_preemptions) == (num_blocks < 200)
    assert {1, 8, 16} <= set(recorder.replayed)


def test_a_graph_that_was_captured_of_nobody_decodes_to_the_engines_longest(decoder: Decoder) -> None:
    (prompt,) = random_prompts([3])
    requests = {"r": (prompt, greedy(125))}
    results = []
    for engine in (make_engine(decoder, options=REFERENCE), engine_with_graphs(decoder)[0]):
        add_requests(engine, requests)
        results.append(run_samples(engine)["r"][0].token_ids)
    assert len(results[0]) == 125
    assert results[0] == results[1]


@pytest.mark.skipif(COMPILER is None, reason="the kernels' source needs g++ to run on the CPU")
def test_the_cuda_kernels_decode_the_reference_tokens_through_graphs(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The kernels' own source, with the grids and splits that a capture for the longest sequence has."""
    sizes = {
        "block_size": 8,
        "num_blocks": 100,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
    }
    requests = {str(i): (prompt, greedy(5)) for i, prompt in enumerate(random_prompts([3, 270, 60, 31, 9]))}
    plain = make_engine(decoder, options=REFERENCE, **sizes)
    add_requests(plain, requests)
    expected = run_samples(plain)

    kernels = layer_kernels(decoder.attention_layers[0], torch.float32, torch.float32)
    library = build(sorted({"copy_blocks", *kernels.names}), tmp_path)
    shim = ShimKernels(library)
    monkeypatch.setattr(cuda, "load_kernels", shim.load)
    engine = make_engine(decoder, options=REFERENCE, **sizes)
    recorder = Recorder()
    monkeypatch.setattr(model_runner, "CudaCapture", lambda device: recorder)
    engine._runner = ModelRunner(decoder, engine.config, "cuda", enforce_eager=False)
    add_requests(engine, requests)
    found = run_samples(engine)
    assert {key: [s.token_ids for s in samples] for key, samples in found.items()} == {
        key: [s.token_ids for s in samples] for key, samples in expected.items()
    }
    assert 8 in recorder.replayed
    assert any(name.startswith("merge_splits") for name in shim.launched)
