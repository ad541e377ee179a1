"""Greedy text is transformers' own, token for token, whatever the model and however the engine is sized."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tessera_cli.engine.engine import Engine
from tessera_cli.models.loader import load_model
from tests.engines import greedy, make_engine, random_prompts, run_requests, tiny_decoder
from tests.families import GENERIC, NATIVE, VOCAB_SIZE, WINDOW, transformers_model, write_family

PROMPTS = random_prompts([1, 3, 16, 31, 48], seed=5)
NUM_TOKENS = 20
SIZES: tuple[dict[str, Any], ...] = (
    {"block_size": 16},
    {"max_num_batched_tokens": 9},
    {"num_blocks": 20, "max_model_len": 76},  # four blocks of room: preempts
    {"max_num_seqs": 2},
)


def generate(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in prompts:
        input_ids = torch.tensor([prompt])
        attention_mask = torch.ones_like(input_ids)
        tokens = model.generate(
            input_ids, attention_mask=attention_mask, do_sample=False, max_new_tokens=NUM_TOKENS
        )
        outputs.append(tokens[0, len(prompt) :].tolist())
    # A model that repeats itself, or says the same to everybody, would prove little.
    assert len({tuple(tokens) for tokens in outputs}) == len(outputs)
    assert all(len(set(tokens)) > 2 for tokens in outputs)
    return outputs


def run(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    requests = {str(index): (prompt, greedy(NUM_TOKENS)) for index, prompt in enumerate(prompts)}
    outputs = run_requests(engine, requests)
    return [outputs[str(index)].token_ids for index in range(len(prompts))]


@pytest.mark.parametrize("model", ["tiny_model_dir", "tiny_untied_model_dir"])
def test_greedy(model: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(model)
    expected = generate(transformers_model(path), PROMPTS)
    decoder = tiny_decoder(path)
    for sizes in SIZES:
        engine = make_engine(decoder, **sizes)
        assert run(engine, PROMPTS) == expected, sizes
        assert (engine.stats().num_preemptions > 0) == ("num_blocks" in sizes)


@pytest.mark.parametrize("name", [*NATIVE, *GENERIC])
def test_every_family_in_a_pool_that_preempts_and_chunks(name: str, tmp_path: Path) -> None:
    path = write_family(name, tmp_path)
    prompts = [[token % (VOCAB_SIZE - 3) + 3 for token in prompt] for prompt in PROMPTS]
    assert len(prompts[0]) < WINDOW < len(prompts[-1])
    expected = generate(transformers_model(path), prompts)
    engine = make_engine(
        load_model(path, torch.float32), num_blocks=20, max_model_len=76, max_num_batched_tokens=9
    )
    assert run(engine, prompts) == expected
    assert engine.stats().num_preemptions > 0
