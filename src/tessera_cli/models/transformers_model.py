"""Decoder-only models that are not native: transformers computes them, around our attention.

transformers asks a registered function for attention. Ours hands queries, keys and values to the `attend` of
the step, so such a model shares the paged cache, the scheduler and the sampler with the native decoder.
Importing this module costs seconds; the loader does so for a model that needs it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from tessera_cli.attention import AttentionLayer
from tessera_cli.errors import ModelError
from tessera_cli.models.causal_lm import Attend
from tessera_cli.models.config import read_hf_config
from tessera_cli.models.hf_config import eos_token_ids
from tessera_cli.models.quantization import read_quantization
from tessera_cli.models.transformers_probe import EAGER, PAGED, UnpageableError, probe_layers

_HINT = "decoders run whose only path between tokens is attention that transformers asks us for: GPT-2, Gemma"
# What transformers raises for a directory that it cannot make a model of.
_FAULTS = (
    OSError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    ImportError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
    SafetensorError,
    StrictDataclassError,
)


@dataclass(frozen=True)
class TransformersConfig:
    """What the engine has to know of such a model.

    Attributes:
        max_position_embeddings: in tokens. Where rotary frequencies change with the length of the sequence,
            this is the length up to which they do not: a longer one would change what is cached already.
        dtype: how the weights are stored.
    """

    model_type: str
    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_parameters: int


class TransformersModel(nn.Module):
    """A model of transformers over packed tokens; see `causal_lm.CausalLM` for the shapes."""

    def __init__(self, model: Any, config: TransformersConfig) -> None:
        """Probe `model` with a few tokens.

        Raises:
            UnpageableError: it does not attend through us alone, or its logits would not be its own.
        """
        super().__init__()
        self.config = config
        self._model = model
        head, base = model.get_output_embeddings(), model.base_model
        if head is None or base is model:
            raise UnpageableError("it has no head of its own over a base model")
        self._output_type: Any = None  # what the base model answers with
        self.attention_layers: tuple[AttentionLayer, ...] = probe_layers(self, model, config)
        model.set_attn_implementation(PAGED)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self._head_weight.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._head_weight.device

    @property
    def _head_weight(self) -> Tensor:
        return self._model.get_output_embeddings().weight

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Normed final hidden states `[num_tokens, hidden]`; all tokens are one row to transformers."""
        output = self._model.base_model(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, attend=attend
        )
        self._output_type = type(output)
        return output.last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits `[n, vocab]`: the model's own head, with whatever it does to them, over `hidden`."""
        base = self._model.base_model
        output = self._output_type(last_hidden_state=hidden[None])
        # The instance's `forward` goes before its class's: the base model answers with these hidden states.
        base.forward = lambda *_, **__: output
        try:
            input_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
            return self._model(input_ids=input_ids, use_cache=False).logits[0].float()
        finally:
            del base.forward


def read_transformers_config(path: Path) -> TransformersConfig:
    """What is known of the model directory `path` without its weights.

    Raises:
        ModelError: transformers has no decoder-only model for it, or it is quantised.
    """
    return _read(path)[1]


def load_transformers_model(
    path: Path, *, dtype: torch.dtype, device: torch.device | str
) -> TransformersModel:
    """Load the model directory `path` through transformers.

    Raises:
        ModelError: transformers cannot load it whole, or it computes more than decoder layers whose only
            path between tokens is attention through us.
    """
    hf_config, config = _read(path)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=hf_config,
            dtype=dtype,
            attn_implementation=EAGER,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except _FAULTS as error:
        raise ModelError(f"{path} cannot be loaded by transformers: {_line(error)}") from error
    for key in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if info.get(key):
            kind, first = key.removesuffix("_keys"), min(info[key])
            raise ModelError(f"{path} has {len(info[key])} {kind} tensors, {first} for one")
    try:
        return TransformersModel(model.to(device).eval().requires_grad_(False), config).eval()
    except UnpageableError as fault:
        raise ModelError(
            f"{path} is {config.model_type!r} and cannot be paged: {fault}", hint=_HINT
        ) from fault


def _read(path: Path) -> tuple[Any, TransformersConfig]:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    raw = read_hf_config(path)
    model_type = raw.get("model_type")
    if read_quantization(raw, str(path)) != "none":
        raise ModelError(
            f"{path} is quantised and {model_type!r}, which is not native",
            hint="take the model that it was made of",
        )
    try:
        hf_config = AutoConfig.from_pretrained(path, local_files_only=True)
        # Parameters without memory: they are only counted.
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(hf_config)
    except _FAULTS as error:
        raise ModelError(
            f"{path} is {model_type!r}, no causal language model to transformers: {_line(error)}",
            hint=_HINT,
        ) from error
    if not hasattr(hf_config, "max_position_embeddings"):
        raise ModelError(f"{path} is {model_type!r}, which has no positions to attend by", hint=_HINT)
    try:
        config = TransformersConfig(
            model_type=str(model_type),
            vocab_size=int(hf_config.vocab_size),
            num_hidden_layers=int(hf_config.num_hidden_layers),
            max_position_embeddings=_max_positions(hf_config),
            eos_token_ids=eos_token_ids(raw.get("eos_token_id", hf_config.eos_token_id)),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            num_parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(f"{path} is {model_type!r}, and config.json lacks a size: {_line(error)}") from error
    return hf_config, config


def _max_positions(hf_config: Any) -> int:
    positions = int(hf_config.max_position_embeddings)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    # One for all layers, or one for each type of layer.
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") == "longrope":
            positions = min(positions, int(parameters["original_max_position_embeddings"]))
    return positions


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0]


def _attend_through(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, attend: Attend, **_: Any
) -> tuple[Tensor, None]:
    """transformers' attention function: [1, heads, tokens, head_dim] -> [1, tokens, heads, head_dim]."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return attend(module.layer_idx, q, k, v)[None], None


AttentionInterface.register(PAGED, _attend_through)
