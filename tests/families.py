"""Tiny seeded models of many families in Hugging Face's own format, and attention in a few plain lines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera_cli.attention import AttentionLayer
from tessera_cli.models.causal_lm import Attend

VOCAB_SIZE = 128
WINDOW = 7

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
}
_SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # wide enough for greedy text to depend on the whole prompt
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_MIXED = ["full_attention", "sliding_attention", "full_attention"]

# What the native decoder computes: a name, transformers' config class, what differs from `_SMALL`.
NATIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama-dynamic": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "mistral-full": ("MistralConfig", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"rope_parameters": _YARN}),
    "qwen2-windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-windows": (
        "Qwen3Config",
        {
            "head_dim": 24,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
        },
    ),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3-windows": (
        "SmolLM3Config",
        {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
    "granite": (
        "GraniteConfig",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 5.0,
        },
    ),
    "olmo2": ("Olmo2Config", {}),
}

# What transformers computes, around our attention.
GENERIC: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"num_key_value_heads": 4}),
    "gpt_neox": ("GPTNeoXConfig", {"num_key_value_heads": 4}),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 9.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 32, "sliding_window": WINDOW, "sliding_window_pattern": 3, "layer_types": _MIXED},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "sliding_window": None}),
}


def write_family(name: str, path: Path, **changes: Any) -> Path:
    """Save the model `name` of either table, seeded, as transformers saves it."""
    import transformers

    class_name, differs = {**NATIVE, **GENERIC}[name]
    config = getattr(transformers, class_name)(**{**_SMALL, **differs, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter_name, parameter in model.named_parameters():
            # Biases start as zeros and norms as ones, which would hide that one of them is left out.
            if parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 0.0 if parameter_name.endswith("bias") else 1.0, 0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(path)
    return path


def transformers_model(path: Path) -> Any:
    """transformers' own, with the attention that spells every step out."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def random_tokens(length: int, *, seed: int = 0) -> list[int]:
    """Token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


def plain_attend(layers: Sequence[AttentionLayer]) -> Attend:
    """Attention over one whole sequence, a matrix of scores per head."""

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layer = layers[index]
        assert q.shape[1:] == (layer.num_heads, layer.head_dim)
        assert k.shape[1:] == v.shape[1:] == (layer.num_kv_heads, layer.head_dim)
        k, v = (x.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
        if layer.logits_soft_cap is not None:
            scores = layer.logits_soft_cap * torch.tanh(scores / layer.logits_soft_cap)
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
        window = len(q) if layer.sliding_window is None else layer.sliding_window
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)

    return attend
