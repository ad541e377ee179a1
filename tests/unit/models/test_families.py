"""Every native family: transformers' logits, its parameter counts, and a way back into transformers."""

from pathlib import Path

import pytest
import torch
from tests.families import NATIVE, WINDOW, plain_attend, random_tokens, transformers_model, write_family
from torch import Tensor

from tessera_cli.errors import ModelError
from tessera_cli.models.config import ModelConfig
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder, save_decoder

LENGTH = 300  # beyond every window and every original context
TOKENS = random_tokens(LENGTH)


@pytest.fixture(scope="module", params=list(NATIVE))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(request.param, tmp_path_factory.mktemp(request.param))


def logits(decoder: Decoder) -> Tensor:
    with torch.inference_mode():
        attend = plain_attend(decoder.attention_layers)
        return decoder.logits(decoder(torch.tensor(TOKENS), torch.arange(LENGTH), attend))


def transformers_logits(path: Path) -> Tensor:
    with torch.inference_mode():
        return transformers_model(path)(torch.tensor([TOKENS])).logits[0]


def test_logits_are_those_of_transformers(model_dir: Path) -> None:
    theirs = transformers_logits(model_dir)
    ours = logits(load_decoder(model_dir, dtype=torch.float32))
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-5)


def test_a_saved_decoder_is_the_same_to_transformers(model_dir: Path, tmp_path: Path) -> None:
    decoder = load_decoder(model_dir, dtype=torch.float32)
    save_decoder(decoder, tmp_path, dtype=torch.float32)
    assert ModelConfig.from_dir(tmp_path) == decoder.config
    torch.testing.assert_close(transformers_logits(tmp_path), transformers_logits(model_dir), atol=0, rtol=0)


def test_parameters_are_counted(model_dir: Path) -> None:
    decoder = load_decoder(model_dir, dtype=torch.float32)
    parameters = dict(decoder.named_parameters())
    assert decoder.config.num_parameters == sum(p.numel() for p in parameters.values())
    matrices = [p for name, p in parameters.items() if p.dim() == 2 and name != "embed_tokens.weight"]
    tied = decoder.head_weight.numel() if decoder.lm_head is None else 0
    assert decoder.config.num_matmul_parameters == sum(p.numel() for p in matrices) + tied
    assert decoder.config.kv_bytes_per_token(2) == sum(
        2 * 2 * layer.num_kv_heads * layer.head_dim for layer in decoder.attention_layers
    )


def test_gradients_are_those_of_transformers(model_dir: Path) -> None:
    decoder, model = load_decoder(model_dir, dtype=torch.float32), transformers_model(model_dir)
    ids = torch.tensor(TOKENS[:20])
    hidden = decoder(ids, torch.arange(20), plain_attend(decoder.attention_layers))
    decoder.logits(hidden).logsumexp(-1).sum().backward()
    model(ids[None]).logits.logsumexp(-1).sum().backward()
    theirs = model.get_input_embeddings().weight.grad
    bound = 1e-4 * float(theirs.abs().max())
    torch.testing.assert_close(decoder.embed_tokens.weight.grad, theirs, atol=bound, rtol=1e-4)


def test_chosen_layers_keep_their_windows_and_rotation(tmp_path: Path) -> None:
    config = load_decoder(write_family("smollm3-windows", tmp_path), dtype=torch.float32).config
    assert config.layer_windows == (WINDOW, None, None)
    chosen = config.with_layers([0, 2])
    assert (chosen.num_hidden_layers, chosen.layer_windows) == (2, (WINDOW, None))
    assert chosen.layer_rotates == (False, True)
    with pytest.raises(ValueError, match="not one value for each of 2 layers"):
        Decoder(ModelConfig(**{**vars(config), "num_hidden_layers": 2}))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("mistral", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"sliding_window": 5}, "sliding_window=5"),
        ("llama", {"final_logit_softcapping": 5.0}, "final_logit_softcapping=5.0"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("qwen2", {"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "incomplete or broken"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries"),
        ("granite", {"logits_scaling": 0.0}, "logits_divisor=0.0"),
    ],
)
def test_variants_that_would_run_wrong_are_refused(
    name: str, changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    import transformers

    raw = getattr(transformers, NATIVE[name][0])(vocab_size=128, num_hidden_layers=3).to_dict()
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf({**raw, **changes}, where="m")
