"""What is refused when it is added, because it could never run."""

from collections.abc import Iterable
from operator import index

from tessera_cli.engine.config import EngineConfig, require
from tessera_cli.engine.sequence import Sequence
from tessera_cli.errors import CapacityError, UsageError


def check_request(sequence: Sequence, config: EngineConfig, *, is_known: bool) -> None:
    """Refuse a request that an engine of these sizes could never finish, or that means nothing.

    `EngineConfig` guarantees that one sequence of `max_model_len` tokens fits the pool, so whatever passes
    here can run once all better-ranked sequences have ended.

    Raises:
        UsageError: an empty prompt, a request id that is still in use, a priority that is not heeded or is no
            whole number, a salt that is no text, or prompt log-probabilities from beyond the prompt's end.
        CapacityError: a prompt that leaves no room for output, or more samples than can run at once.
    """
    if is_known:
        raise UsageError(
            f"request {sequence.request_id!r} is already in the engine",
            hint="give each live request its own id",
        )
    # From here on no id: whoever asked through a server or a prompt file never gave one.
    if sequence.num_tokens == 0:
        raise UsageError("the prompt is empty", hint="give at least one token", param="prompt")
    require("priority", repr(sequence.priority), isinstance(sequence.priority, int), "a whole number")
    salt = sequence.cache_salt
    require("cache_salt", repr(salt), salt is None or isinstance(salt, str), "text")
    if sequence.priority and config.scheduling_policy == "fcfs":
        raise UsageError(
            f"priority is {sequence.priority}, and the engine goes by arrival alone",
            hint='leave the priority out, or use scheduling_policy="priority"',
            param="priority",
        )
    first = sequence.params.prompt_logprobs_start
    if first > sequence.num_tokens:
        raise UsageError(
            f"prompt_logprobs_start is {first}, and the prompt has {sequence.num_tokens} tokens",
            hint="give a position in the prompt, counted from 0",
            param="prompt_logprobs_start",
        )
    if sequence.num_tokens >= config.max_model_len:
        raise CapacityError(
            f"the prompt of {sequence.num_tokens} tokens leaves no room for output in"
            f" max_model_len={config.max_model_len}",
            hint=f"shorten the prompt to {config.max_model_len - 1} tokens or raise max_model_len",
            param="prompt",
        )
    num_samples = 1 + sequence.num_pending_forks
    if num_samples > config.max_num_slots:
        limit = "max_num_seqs" if num_samples > config.max_num_seqs else "max_num_batched_tokens"
        raise CapacityError(
            f"n={num_samples} samples run at once, and {limit} is {getattr(config, limit)}",
            hint=f"lower n or raise {limit}",
            param="n",
        )


def check_prompt(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """The prompt as plain numbers.

    Raises:
        UsageError: something in it is no whole number from 0 to `vocab_size - 1`.
    """
    try:
        prompt = [index(token) for token in token_ids]
    except TypeError as error:
        raise UsageError(
            f"the prompt is no list of token ids: {error}",
            hint="give token ids, which are whole numbers",
            param="prompt",
        ) from None
    bad = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise UsageError(
            f"the prompt has token id {bad}",
            hint=f"the model's ids go from 0 to {vocab_size - 1}",
            param="prompt",
        )
    return prompt
