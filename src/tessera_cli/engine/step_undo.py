"""The way back from a step that failed, wherever it was: queues and blocks as if it had never begun.

Ctrl-C may come between any two lines of the scheduler, so nothing that the step has touched is believed:
the queues and the pool are made anew from the live sequences and their block tables.
"""

from tessera_cli.engine.block_pool import BlockPool
from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.prefix_cache import PrefixCache
from tessera_cli.engine.queues import Queues
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.step_plan import Step, restart, withdraw


def undo_step(
    step: Step | None, config: EngineConfig, queues: Queues, prefix_cache: PrefixCache
) -> BlockPool:
    """Put sequences and queues where they were before `step`; the pool that goes with them.

    What the step computed and sampled counts for nothing. The prefix cache, which cannot be trusted, is empty
    afterwards. Sequences that ran before go on with their blocks, up to the first that cannot: one that the
    step has preempted, because it may have written into the blocks that it took, or one with a block whose
    copy may be missing. That one and all behind it wait and hold none. What the step wrote into blocks that
    stay with their owner is at positions not yet computed. Where it was decided already who ends, they end.
    """
    if step is not None and step.is_decided:
        for sequence, reason in step.ended:
            queues.end(sequence, reason)
    elif step is not None:
        _take_back(step, queues)
    waits = False
    for sequence in queues.ordered():
        withdraw(sequence)
        if sequence.aborted:
            queues.end(sequence, FinishReason.ABORT)
            continue
        waits = waits or not sequence.num_computed_tokens
        if waits:
            restart(sequence)
    queues.rebuild()
    prefix_cache.clear()
    return BlockPool(
        config.num_blocks,
        prefix_cache,
        num_kept=config.num_kept_blocks,
        tables=[sequence.block_table for sequence in queues.running],
    )


def _take_back(step: Step, queues: Queues) -> None:
    """Take from the sequences what the step and its unfinished commit gave them."""
    for item in step.scheduled:
        sequence = item.sequence
        sequence.num_computed_tokens = item.start
        if item.num_samples:
            del sequence.token_ids[item.start + item.num_scheduled_tokens :]
            sequence.num_pending_forks = item.num_samples - 1
        sequence.error = sequence.stop_reason = None
    for sequence in (*step.admitted, *step.copied):
        sequence.num_computed_tokens = 0
    for child in step.children:
        child.block_table.clear()
        queues.forget(child)
