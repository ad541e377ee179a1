"""Decoders to and from Hugging Face model directories."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tessera_cli.errors import ModelError, UsageError
from tessera_cli.models.causal_lm import CausalLM, CausalLMConfig
from tessera_cli.models.checkpoint_tensors import DTYPES, checkpoint_tensors, is_of_int8, store
from tessera_cli.models.config import ModelConfig, read_hf_config
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.hf_families import FAMILIES
from tessera_cli.models.linear_layers import tie_int8_head, use_int8_layers
from tessera_cli.models.quantization import QUANTIZATIONS, Quantization
from tessera_cli.models.weight_files import (
    INT8_WEIGHTS,
    WEIGHTS,
    StoredTensor,
    num_stored_bytes,
    read_tensors,
)
from tessera_cli.models.weight_memory import allocate, allocate_together


def select_dtype(name: str, stored: str, device: str) -> torch.dtype:
    """The dtype to compute in: `name`, or for "auto" float32 on a CPU and the `stored` one elsewhere.

    A CPU without bfloat16 units emulates them, slower than float32; "auto" never picks that.

    Raises:
        UsageError: `name` is not a dtype.
    """
    if name == "auto":
        name = "float32" if device == "cpu" else stored
    if name not in DTYPES:
        raise UsageError(f"{name!r} is not a dtype", hint="use auto, " + ", ".join(DTYPES))
    return DTYPES[name]


def select_quantization(name: str, config: CausalLMConfig, path: Path) -> Quantization:
    """How the matrices of the checkpoint `path` run: `name`, or for "auto" as it has them.

    Raises:
        UsageError: `name` is no quantisation, or means nothing for this checkpoint.
    """
    if name not in ("auto", *QUANTIZATIONS):
        raise UsageError(f"{name!r} is not a quantisation", hint="use auto, " + ", ".join(QUANTIZATIONS))
    stored = config.quantization if isinstance(config, ModelConfig) else "none"
    if name == "none" and stored != "none":
        raise UsageError(
            f"{path} is quantised to {stored} and cannot run without",
            hint="leave --quantization out, or take the model that it was made of",
        )
    if name == "int8" and not isinstance(config, ModelConfig):
        raise UsageError(
            f"{path} runs through transformers, where no weight is quantised",
            hint="leave --quantization out; int8 is for models that run natively",
        )
    return "int8" if "int8" in (name, stored) else "none"


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


def load_model(
    path: Path, dtype: torch.dtype, device: torch.device | str = "cpu", quantization: Quantization = "none"
) -> CausalLM:
    """Load the model directory `path` to serve it: natively, or else through transformers.

    `quantization` is what `select_quantization` says.

    Raises:
        ModelError: nothing here computes such a model, or its weights are not whole.
    """
    if str(read_hf_config(path).get("model_type")) in FAMILIES:
        if quantization == "int8":
            return load_int8_decoder(path, dtype=dtype, device=device)
        return load_decoder(path, dtype=dtype, device=device, together=str(device) == "cpu")
    from tessera_cli.models.transformers_model import load_transformers_model

    return load_transformers_model(path, dtype=dtype, device=device)


def load_decoder(
    path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", together: bool = False
) -> Decoder:
    """Load the native decoder of the model directory `path` (config.json, one or more safetensors files).

    Each tensor is read from the mapped file straight into the decoder's own, so that no second copy of the
    weights is ever in memory. With `together`, on a CPU, they lie as `allocate_together` has it.

    Raises:
        ModelError: weights are missing, unexpected, quantised or of another shape, or a file is damaged.
    """
    config = ModelConfig.unquantised(path)
    _check_size(config, path)
    decoder = Decoder(config, dtype=dtype, device="meta")
    allocate_together(decoder) if together else allocate(decoder, device)
    _fill(decoder, path, is_quantised=False)
    return decoder.eval()


def load_int8_decoder(path: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> Decoder:
    """Load the native decoder of `path` for inference, its matrices in int8.

    They are read as `tessera quantize` wrote them, or quantised tensor by tensor: to the bit the same.
    `dtype` is of everything else.

    Raises:
        ModelError: as `load_decoder`, but for weights that Tessera quantised; or one is not finite.
    """
    config = ModelConfig.from_dir(path)
    _check_size(config, path)
    decoder = Decoder(replace(config, quantization="int8"), dtype=dtype, device="meta")
    use_int8_layers(decoder)
    allocate_together(decoder) if str(device) == "cpu" else allocate(decoder, device)
    _fill(decoder, path, is_quantised=config.quantization == "int8")
    tie_int8_head(decoder)
    return decoder.eval().requires_grad_(False)


def _fill(decoder: Decoder, path: Path, *, is_quantised: bool) -> None:
    """Read every tensor of `path` into `decoder`."""
    targets = dict(checkpoint_tensors(decoder))
    missing = set(targets)
    tied_head: StoredTensor | None = None
    for stored in read_tensors(path):
        if stored.name == "lm_head.weight" and decoder.config.tie_word_embeddings:
            tied_head = stored
        elif not stored.name.endswith("rotary_emb.inv_freq"):
            missing -= store(stored, targets, is_quantised=is_quantised)
    if missing:
        first = min(missing)
        raise ModelError(f"{path} lacks {len(missing)} of {len(targets)} tensors, {first} for one")
    if tied_head is not None:
        _check_tied(tied_head, targets, is_quantised=is_quantised)


def _check_size(config: ModelConfig, path: Path) -> None:
    """Refuse sizes that the weights cannot have before memory for them is asked for."""
    num_bytes = num_stored_bytes(path)
    if config.num_parameters > num_bytes:  # less than a byte for each
        raise ModelError(
            f"{path}: config.json asks for {config.num_parameters:,} parameters, and the weights have"
            f" {num_bytes:,} bytes",
            hint="download or convert the model again",
        )


def _check_tied(head: StoredTensor, targets: dict[str, Tensor], *, is_quantised: bool) -> None:
    """Refuse a head that `tie_word_embeddings` would drop although it is another matrix."""
    name = "model.embed_tokens.weight"
    embedding = {key: value for key, value in targets.items() if key.startswith(name)}
    copies = {key: torch.empty_like(value) for key, value in embedding.items()}
    same = head.value.shape == embedding[name].shape
    if same:
        store(replace(head, name=name), copies, is_quantised=is_quantised)
        same = all(torch.equal(copies[key], value) for key, value in embedding.items())
    if not same:
        raise ModelError(
            f"{head.file} holds an lm_head.weight of its own, and config.json ties it to the embedding",
            hint="set tie_word_embeddings to false, or remove the tensor",
        )


def save_decoder(decoder: Decoder, path: Path, *, dtype: torch.dtype) -> None:
    """Write `path/config.json` and `path/model.safetensors` as `transformers` names and shapes them.

    `dtype` is of parameters; int8 values and their scales stay as they are, in a file that transformers does
    not read. `path` must exist; the caller makes it whole by renaming it.
    """
    stored = next(name for name, value in DTYPES.items() if value == dtype)
    config = decoder.config.to_hf() | {"dtype": stored}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoint_tensors(decoder):
        kept = tensor.dtype if is_of_int8(name, tensor) else dtype
        tensors[name] = tensor.detach().to("cpu", kept).contiguous()
    file = path / (WEIGHTS if decoder.config.quantization == "none" else INT8_WEIGHTS)
    save_file(tensors, file, metadata={"format": "pt"})
    # safetensors writes for its owner only; a model is as readable as the files beside it.
    file.chmod((path / "config.json").stat().st_mode & 0o777)
