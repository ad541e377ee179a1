"""Steps that decide nothing: every running sequence gets one more token, nobody comes, goes or is preempted.

A simulation need not plan them one by one. Nobody who waits can be admitted in one: places stay as they are
and free blocks only get fewer. The scheduler is left in the state in which it would be, but that the blocks
of the skipped tokens are taken all together by its next step; there are enough, which is seen to.
"""

from collections.abc import Sequence as SequenceOf

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.sequence import Sequence
from tessera_cli.serving.cost_model import StepLoad


class QuietSteps:
    """The quiet steps ahead of `running`, all of which decode; `num_free_blocks` are free before the first.

    Attributes:
        count: steps passed so far.
    """

    def __init__(self, running: SequenceOf[Sequence], config: EngineConfig, num_free_blocks: int) -> None:
        self.count = 0
        # The step that ends a sequence is no quiet one.
        self._most = min(_num_tokens_left(sequence, config) for sequence in running) - 1
        self._num_running = len(running)
        self._block_size = config.block_size
        self._num_free_blocks = num_free_blocks
        self._num_context_tokens = 0
        # How many sequences start a block in steps 0, 1, ... block_size - 1, and so on in turn.
        self._starts = [0] * config.block_size
        if self._most > 0:
            for sequence in running:
                num_tokens = len(sequence.token_ids)
                self._num_context_tokens += num_tokens
                self._starts[-(num_tokens - 1) % config.block_size] += 1

    def has_next(self) -> bool:
        """Whether another quiet step can pass, and the blocks suffice for the step after it too."""
        if self.count >= self._most:
            return False
        needed = self._num_new_blocks(self.count) + self._num_new_blocks(self.count + 1)
        return needed <= self._num_free_blocks

    def next(self) -> tuple[StepLoad, int]:
        """Pass one: what is in it, and the blocks that it leaves free."""
        self._num_free_blocks -= self._num_new_blocks(self.count)
        # Each sequence reads all of its tokens, and its new token sees all of them.
        num_context_tokens = self._num_context_tokens + self.count * self._num_running
        self.count += 1
        load = StepLoad(self._num_running, self._num_running, num_context_tokens, num_context_tokens)
        return load, self._num_free_blocks

    def apply(self, running: SequenceOf[Sequence]) -> None:
        """Give the sequences the tokens of the steps that have passed."""
        for sequence in running:
            sequence.token_ids += [0] * self.count
            sequence.num_computed_tokens += self.count

    def _num_new_blocks(self, step: int) -> int:
        return self._starts[step % self._block_size]


def _num_tokens_left(sequence: Sequence, config: EngineConfig) -> int:
    num_tokens = len(sequence.token_ids)
    num_output_tokens = num_tokens - sequence.num_prompt_tokens
    return min(sequence.params.max_tokens - num_output_tokens, config.max_model_len - num_tokens)
