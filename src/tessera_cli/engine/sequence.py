"""One sample of a request: its tokens, how many of them are computed, and the blocks that hold them."""

from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, TypeAlias

from tessera_cli.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tessera_cli.engine.prefix_cache import PublishedBlock

SequenceKey: TypeAlias = tuple[str, int]
"""Request id and child index: what tells one live sequence from all others."""


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

    A request with n samples is one sequence, its child 0, until its prompt is computed; then `fork` makes the
    other n - 1. Only the scheduler changes a sequence.

    Attributes:
        key: request id and child index.
        token_ids: the prompt and every sampled token, the stop token that ended it included.
        num_computed_tokens: so many of them have keys and values in the cache.
        block_table: entry i is the block of positions `i * block_size` to `(i + 1) * block_size - 1`.
        rank: (priority, arrival, child index), the one order of all sequences; the least goes first.
        num_pending_forks: children that are still to be made; their places are reserved.
        num_cached_tokens: tokens that the prefix cache gave it when it was last admitted.
        block_digests: digests of its leading full blocks, as far as they were ever asked for.
        may_publish: whether its cache holds what its tokens and the present weights say.
        num_published_blocks: leading blocks that are in the prefix cache, its own or another's copy of them.
        last_published: the last of these.
    """

    __slots__ = (
        "aborted",
        "block_digests",
        "block_table",
        "cache_salt",
        "child_index",
        "error",
        "finish_reason",
        "key",
        "last_published",
        "may_publish",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_pending_forks",
        "num_prompt_tokens",
        "num_published_blocks",
        "params",
        "priority",
        "rank",
        "request_id",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        child_index: int = 0,
    ) -> None:
        self.request_id = request_id
        self.child_index = child_index
        self.key: SequenceKey = (request_id, child_index)
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.params = params
        self.priority = priority
        self.cache_salt = cache_salt
        self.rank = (priority, 0, child_index)
        self.num_pending_forks = params.n - 1
        self.num_cached_tokens = 0
        self.block_digests: list[bytes] = []
        self.may_publish = False
        self.num_published_blocks = 0
        self.last_published: PublishedBlock | None = None
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | None = None
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
        """A copy of the sampled tokens; after FinishReason.STOP the last one may be the stop token."""
        return self.token_ids[self.num_prompt_tokens :]

    def fork(self, child_index: int) -> "Sequence":
        """A running copy in the same blocks; the caller counts its references to them."""
        child = Sequence(
            self.request_id,
            self.token_ids,
            self.params,
            priority=self.priority,
            cache_salt=self.cache_salt,
            child_index=child_index,
        )
        child.num_prompt_tokens = self.num_prompt_tokens
        child.num_computed_tokens = self.num_computed_tokens
        child.block_table = list(self.block_table)
        child.rank = (*self.rank[:2], child_index)
        child.num_pending_forks = 0
        child.num_cached_tokens = self.num_cached_tokens
        child.block_digests = list(self.block_digests)
        child.may_publish = self.may_publish
        child.num_published_blocks = self.num_published_blocks
        child.last_published = self.last_published
        child.status = self.status
        return child

    def reason_to_finish(self, eos_token_ids: AbstractSet[int], max_model_len: int) -> FinishReason | None:
        """Why the last sampled token ends the sequence, or None; a stop token at the very limit is a stop.

        Below `min_tokens` no token stops. Sets `stop_reason` if one of `stop_token_ids` ended it; a token
        that is also the model's end of sequence counts as that.
        """
        token_id = self.token_ids[-1]
        params = self.params
        num_output_tokens = len(self.token_ids) - self.num_prompt_tokens
        if num_output_tokens >= params.min_tokens:
            if token_id in eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
            if token_id in params.stop_token_ids:
                self.stop_reason = token_id
                return FinishReason.STOP
        if num_output_tokens >= params.max_tokens or len(self.token_ids) >= max_model_len:
            return FinishReason.LENGTH
        return None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}/{self.child_index}, {self.status.name}, computed"
            f" {self.num_computed_tokens} of {self.num_prompt_tokens}+{self.num_output_tokens} tokens,"
            f" {len(self.block_table)} blocks)"
        )
