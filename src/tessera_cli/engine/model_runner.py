"""Runs what the scheduler chose: tensors in, one token per sequence that samples out; changes no sequence."""

from functools import partial

import torch

from tessera_cli.engine.batch import build_batch
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.sampler import sample, uniform
from tessera_cli.engine.scheduler_output import SchedulerOutput
from tessera_cli.engine.sequence import SampleError, Sequence
from tessera_cli.errors import CapacityError
from tessera_cli.kernels.reference import ReferenceAttention
from tessera_cli.models.decoder import Decoder


class ModelRunner:
    """Holds a decoder and the KV cache of its layers, in the decoder's dtype and on its device.

    Raises:
        CapacityError: the device has no memory for the KV cache.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig, backend: str) -> None:
        if backend != "reference":
            raise ValueError(f"no attention backend {backend!r}")
        weight = decoder.head_weight
        self._decoder = decoder
        self._config = config
        self._device = weight.device
        try:
            self._attention = ReferenceAttention(
                num_layers=decoder.config.num_hidden_layers,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                num_kv_heads=decoder.config.num_key_value_heads,
                head_dim=decoder.config.head_dim,
                dtype=weight.dtype,
                device=weight.device,
            )
        except (RuntimeError, TypeError) as error:  # out of memory, or a size beyond 64 bits
            raise CapacityError(
                f"a KV cache of {config.num_blocks} blocks of {config.block_size} tokens does not fit into"
                f" the memory of {weight.device}",
                hint="lower kv_cache_memory or num_blocks",
            ) from error

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> dict[str, int | SampleError]:
        """Compute a step that schedules at least one token.

        Returns:
            A token, or why there is none, for every request id that samples in this step.
        """
        batch = build_batch(output, block_size=self._config.block_size, device=self._device)
        attend = partial(self._attention.attend, batch.metadata)
        hidden = self._decoder(batch.input_ids, batch.positions, attend)
        if not batch.sampling:
            return {}
        logits = self._decoder.logits(hidden[batch.logits_indices])
        tokens = sample(
            logits,
            [sequence.params for sequence in batch.sampling],
            [_uniform(sequence) for sequence in batch.sampling],
        )
        return {sequence.request_id: token for sequence, token in zip(batch.sampling, tokens, strict=True)}


def _uniform(sequence: Sequence) -> float:
    seed = sequence.params.seed
    if seed is None:
        raise ValueError(f"request {sequence.request_id!r} has no seed; Engine.add_request draws one")
    return uniform(seed, 0, sequence.num_tokens)
