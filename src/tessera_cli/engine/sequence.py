"""One request inside the engine: its tokens, how many of them are computed, and the blocks that hold them."""

from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from tessera_cli.engine.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence is; PREEMPTED waits like WAITING, but has been running before."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class FinishReason(StrEnum):
    """Why a sequence ended, in OpenAI's words where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class SampleError:
    """Stands for a token that could not be sampled: its sequence ends with an error, the others go on."""

    message: str


class Sequence:
    """A prompt and what has been generated after it.

    `token_ids` holds the prompt and every sampled token, the stop token that ended it included. The first
    `num_computed_tokens` of them have keys and values in the cache; `block_table[i]` is the physical block of
    positions `i * block_size` up to `(i + 1) * block_size`. Only the scheduler changes a sequence.
    """

    def __init__(self, request_id: str, prompt_token_ids: SequenceOf[int], params: SamplingParams) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.params = params
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.aborted = False

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the sampled tokens; after FinishReason.STOP the last one is the stop token."""
        return self.token_ids[self.num_prompt_tokens :]

    def reason_to_finish(self, eos_token_ids: AbstractSet[int], max_model_len: int) -> FinishReason | None:
        """Why the last sampled token ends the sequence, or None; a stop token at the very limit is a stop."""
        token_id = self.token_ids[-1]
        is_eos = token_id in eos_token_ids and not self.params.ignore_eos
        if is_eos or token_id in self.params.stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= self.params.max_tokens or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.status.name}, computed {self.num_computed_tokens} of"
            f" {self.num_prompt_tokens}+{self.num_output_tokens} tokens, {len(self.block_table)} blocks)"
        )
