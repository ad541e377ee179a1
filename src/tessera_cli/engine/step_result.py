"""What one step of the model gives back: all that passes from the runner to the scheduler and the outputs."""

from dataclasses import dataclass, field

from tessera_cli.engine.sequence import SampleError, SequenceKey


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of one token: natural logarithms of its own, unchanged distribution.

    Attributes:
        token_id: the token that stands at the position.
        logprob: its log-probability; finite.
        rank: 1 for the most likely token; one more than the tokens that are more likely.
        top: the most likely tokens with their log-probabilities, most likely first, as many as were asked
            for; `token_id` may be among them.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The prompt tokens at positions `start`, `start + 1`, ... as far as one step computed them.

    A row is None where the logits were not finite; position 0 has no row, because nothing stands before it.
    """

    start: int
    rows: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's outcome.

    Attributes:
        tokens: for each sequence that samples, as many tokens as the scheduler asked for; in place of
            one that could not be sampled, why.
        logprobs: for each of these that asks for them, one per token; absent where there is no token.
        prompt_logprobs: for each sequence that asks for them and computed prompt positions in this step.
    """

    tokens: dict[SequenceKey, list[int | SampleError]] = field(default_factory=dict)
    logprobs: dict[SequenceKey, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[SequenceKey, PromptLogprobs] = field(default_factory=dict)
