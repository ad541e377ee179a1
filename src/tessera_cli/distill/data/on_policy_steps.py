"""Which steps train on the student's answers, and what these need: known before the run; no torch."""

import numpy as np

from tessera_cli.engine.config import EngineConfig
from tessera_cli.recipe.data_section import DataSection
from tessera_cli.recipe.sampling_section import OnPolicySection

_MOST_COUNTED = 100_000


def is_on_policy(step: int, section: OnPolicySection, seed: int) -> bool:
    """Whether step `step`, from 1, of a run with `seed` trains on the student's answers."""
    return bool(np.random.default_rng([seed, section.seed, step]).random() < section.fraction)


def count_on_policy_steps(num_steps: int, section: OnPolicySection, seed: int, *, estimate: bool) -> int:
    """How many of a run's steps train on the student's answers; as an `estimate` of a great many, about."""
    counted = min(num_steps, _MOST_COUNTED) if estimate else num_steps
    found = sum(is_on_policy(step, section, seed) for step in range(1, counted + 1))
    return round(found * num_steps / counted)


def answering_engine(data: DataSection, section: OnPolicySection) -> EngineConfig:
    """The sizes of the student's engine: its KV cache is all that `max_num_seqs` answers can ever fill."""
    blocks_of_a_row = -(-data.max_seq_len // EngineConfig.block_size)
    return EngineConfig(
        num_blocks=1 + section.max_num_seqs * blocks_of_a_row,
        max_model_len=data.max_seq_len,
        max_num_seqs=section.max_num_seqs,
    )
