"""Decoders to and from Hugging Face model directories."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tessera_cli.errors import ModelError, UsageError
from tessera_cli.models.causal_lm import CausalLM, CausalLMConfig
from tessera_cli.models.config import ModelConfig, read_hf_config
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.hf_families import FAMILIES

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Our module in a layer <- the checkpoint's modules, stacked in this order; not every family has all.
_MODULES = {
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "o_proj": ("self_attn.o_proj",),
    "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "down_proj": ("mlp.down_proj",),
    "input_layernorm": ("input_layernorm",),
    "post_attention_layernorm": ("post_attention_layernorm",),
    "post_feedforward_layernorm": ("post_feedforward_layernorm",),
}


def select_dtype(name: str, stored: str, device: str) -> torch.dtype:
    """The dtype to compute in: `name`, or for "auto" float32 on a CPU and the `stored` one elsewhere.

    A CPU without bfloat16 units emulates them, slower than float32; "auto" never picks that.

    Raises:
        UsageError: `name` is not a dtype.
    """
    if name == "auto":
        name = "float32" if device == "cpu" else stored
    if name not in _DTYPES:
        raise UsageError(f"{name!r} is not a dtype", hint="use auto, " + ", ".join(_DTYPES))
    return _DTYPES[name]


def load_config(path: Path) -> CausalLMConfig:
    """What is known of the model directory `path` without its weights, native or not.

    Raises:
        ModelError: no readable config, or nothing here computes such a model.
    """
    raw = read_hf_config(path)
    if str(raw.get("model_type")) in FAMILIES:
        return ModelConfig.from_hf(raw, where=str(path))
    from tessera_cli.models.transformers_model import read_transformers_config

    return read_transformers_config(path)


def load_model(path: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> CausalLM:
    """Load the model directory `path` to serve it: natively, or else through transformers.

    Raises:
        ModelError: nothing here computes such a model, or its weights are not whole.
    """
    if str(read_hf_config(path).get("model_type")) in FAMILIES:
        return load_decoder(path, dtype=dtype, device=device)
    from tessera_cli.models.transformers_model import load_transformers_model

    return load_transformers_model(path, dtype=dtype, device=device)


def load_decoder(path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """Load the native decoder of the model directory `path` (config.json, one or more safetensors files).

    Each tensor is read from the mapped file straight into the decoder's own, so that no second copy of the
    weights is ever in memory.

    Raises:
        ModelError: weights are missing, unexpected, quantised or of another shape, or a file is damaged.
    """
    config = ModelConfig.from_dir(path)
    decoder = Decoder(config, dtype=dtype, device="meta").to_empty(device=device)
    targets = dict(_targets(decoder))
    missing = set(targets)
    tied_head: Path | None = None
    for file, names in _weight_files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in names if names is not None else tensors.keys():
                    if name == "lm_head.weight" and config.tie_word_embeddings:
                        tied_head = file
                        continue
                    if name.endswith("rotary_emb.inv_freq"):
                        continue
                    if name not in targets:
                        raise ModelError(f"{file} holds {name}, which a model of this config does not have")
                    _copy(tensors.get_tensor(name), targets[name], name, file)
                    missing.discard(name)
        except SafetensorError as error:
            raise ModelError(
                f"{file} is damaged: {error}", hint="download or convert the model again"
            ) from error
        except OSError as error:
            raise ModelError(
                f"{file} cannot be read: {error}", hint="download or convert the model again"
            ) from error
    if missing:
        first = min(missing)
        raise ModelError(f"{path} lacks {len(missing)} of {len(targets)} tensors, {first} for one")
    if tied_head is not None:
        _check_tied(tied_head, decoder.head_weight)
    return decoder.eval()


def _check_tied(file: Path, head_weight: Tensor) -> None:
    """Refuse a head that `tie_word_embeddings` would drop although it is another matrix."""
    with safe_open(file, framework="pt") as tensors:
        stored = tensors.get_tensor("lm_head.weight")
    same = stored.shape == head_weight.shape and torch.equal(
        stored.to(head_weight.dtype), head_weight.detach().to("cpu")
    )
    if not same:
        raise ModelError(
            f"{file} holds an lm_head.weight of its own, and config.json ties it to the embedding",
            hint="set tie_word_embeddings to false, or remove the tensor",
        )


def save_decoder(decoder: Decoder, path: Path, *, dtype: torch.dtype) -> None:
    """Write `path/config.json` and `path/model.safetensors` as `transformers` names and shapes them.

    `path` must exist; the caller makes it whole by renaming it.
    """
    stored = next(name for name, value in _DTYPES.items() if value == dtype)
    config = decoder.config.to_hf() | {"dtype": stored}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for name, parameter in _targets(decoder):
        tensors[name] = parameter.detach().to("cpu", dtype).contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    # safetensors writes for its owner only; a model is as readable as the files beside it.
    (path / "model.safetensors").chmod((path / "config.json").stat().st_mode & 0o777)


def _targets(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensor names, each with the slice of our (fused) parameter that holds it."""
    config = decoder.config
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    splits = {
        "qkv_proj": [query, key_value, key_value],
        "gate_up_proj": [config.intermediate_size, config.intermediate_size],
    }
    yield "model.embed_tokens.weight", decoder.embed_tokens.weight
    for index, layer in enumerate(decoder.layers):
        for ours, module in layer.named_children():
            for kind, parameter in module.named_parameters():  # weight, and perhaps bias
                parts = parameter.split(splits[ours]) if ours in splits else (parameter,)
                for theirs, part in zip(_MODULES[ours], parts, strict=True):
                    yield f"model.layers.{index}.{theirs}.{kind}", part
    yield "model.norm.weight", decoder.norm.weight
    if decoder.lm_head is not None:
        yield "lm_head.weight", decoder.lm_head.weight


@torch.no_grad()
def _copy(source: Tensor, target: Tensor, name: str, file: Path) -> None:
    if source.shape != target.shape:
        raise ModelError(
            f"{file}: {name} is {list(source.shape)}, but config.json asks for {list(target.shape)}"
        )
    if source.dtype not in _DTYPES.values():  # quantised: its scales are elsewhere, if anywhere
        raise ModelError(
            f"{file}: {name} is stored as {str(source.dtype).removeprefix('torch.')}",
            hint="use weights stored as " + ", ".join(_DTYPES),
        )
    target.copy_(source)


def _weight_files(path: Path) -> Iterator[tuple[Path, list[str] | None]]:
    """The safetensors files of a directory, each with the tensors to take from it (None: all)."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {file: path / file for file in sorted(set(weight_map.values()))}
        except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
            raise ModelError(f"{index} cannot be read: {error}") from error
        for holder, file in files.items():
            yield file, sorted(name for name, named in weight_map.items() if named == holder)
    elif (path / "model.safetensors").exists():
        yield path / "model.safetensors", None
    else:
        raise ModelError(
            f"{path} has no model.safetensors",
            hint="Tessera reads safetensors (and .gguf files), not pickled weights",
        )
