"""Greedy text is transformers' own, token for token, however the engine is sized."""

from pathlib import Path

import pytest
import torch

from tests.engines import greedy, make_engine, random_prompts, run_requests, tiny_decoder

PROMPTS = random_prompts([1, 3, 16, 31, 48], seed=5)
NUM_TOKENS = 20


def generate(path: Path) -> list[list[int]]:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path)
    model.generation_config.eos_token_id = None
    outputs = []
    for prompt in PROMPTS:
        input_ids = torch.tensor([prompt])
        attention_mask = torch.ones_like(input_ids)
        tokens = model.generate(
            input_ids, attention_mask=attention_mask, do_sample=False, max_new_tokens=NUM_TOKENS
        )
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


@pytest.mark.parametrize("model", ["tiny_model_dir", "tiny_untied_model_dir"])
def test_greedy(model: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(model)
    expected = generate(path)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    assert all(len(set(tokens)) > 5 for tokens in expected)  # a model that repeats itself would prove little
    decoder = tiny_decoder(path)
    requests = {str(index): (prompt, greedy(NUM_TOKENS)) for index, prompt in enumerate(PROMPTS)}
    for sizes in (
        {"block_size": 16},
        {"max_num_batched_tokens": 9},
        {"num_blocks": 20, "max_model_len": 76},  # four blocks of room: preempts
        {"max_num_seqs": 2},
    ):
        engine = make_engine(decoder, **sizes)
        outputs = run_requests(engine, requests)
        assert [outputs[str(index)].token_ids for index in range(len(PROMPTS))] == expected, sizes
        assert (engine.stats().num_preemptions > 0) == ("num_blocks" in sizes)
