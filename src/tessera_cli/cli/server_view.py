"""A server's progress, as the live table of an engine takes it."""

from typing import TYPE_CHECKING

from tessera_cli.engine.stats import EngineStats

if TYPE_CHECKING:
    from tessera_cli.serving.server_load import ServerProgress


def as_stats(progress: "ServerProgress") -> EngineStats:
    """The figures that clients see; no blocks, as nobody outside sees those."""
    return EngineStats(
        num_running=progress.num_running,
        num_waiting=progress.num_waiting,
        num_preemptions=0,
        num_finished=0,
        num_failed=0,
        num_blocks=0,
        num_used_blocks=0,
        block_size=0,
        prompt_tokens=progress.prompt_tokens,
        generation_tokens=progress.generation_tokens,
        num_steps=0,
    )
