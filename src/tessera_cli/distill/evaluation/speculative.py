"""What a student is worth as a draft model: the speed-up that speculative decoding can expect of it."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tessera_cli.distill.evaluation.samples import engine_for
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.models.decoder import Decoder

MAX_DRAFT_LENGTH = 16
ROUNDS, TOKENS_PER_ROUND = 3, 16
PROMPT_TOKENS = 64
# A token of a prompt, the token that it makes, and the one that a decode step makes of that.
MIN_POSITIONS = 3


@dataclass(frozen=True)
class SpeculativeSpeedup:
    """The best draft length γ and the speed-up expected of it; γ = 0 where drafting does not pay.

    `cost_ratio` is the time of one student step over that of one teacher step, for one sequence.
    """

    acceptance: float
    cost_ratio: float
    draft_length: int
    speedup: float


def expected_speedup(acceptance: float, draft_length: int, cost_ratio: float) -> float:
    """(1 − α^(γ+1)) / ((1 − α)(γc + 1)): Leviathan et al., arXiv 2211.17192, theorem 3.8.

    Taken there: each draft token is accepted with probability α whatever came before, and the teacher checks
    γ + 1 tokens in the time of one.
    """
    # The sum that (1 − α^(γ+1)) / (1 − α) is short for also holds where α = 1.
    tokens = sum(acceptance**accepted for accepted in range(draft_length + 1))
    return tokens / (draft_length * cost_ratio + 1)


def best_speedup(acceptance: float, cost_ratio: float) -> SpeculativeSpeedup:
    """The best of the draft lengths from 0 to 16, the shortest among equals."""
    speedups = [expected_speedup(acceptance, length, cost_ratio) for length in range(MAX_DRAFT_LENGTH + 1)]
    best = max(speedups)
    return SpeculativeSpeedup(acceptance, cost_ratio, speedups.index(best), best)


def measure_cost_ratio(teacher: Decoder, student: Decoder, prompt: Sequence[int]) -> float | None:
    """The median decode step of the student over that of the teacher: one sequence, in this engine, in turn.

    `prompt` is cut so that it leaves room for the steps. None where no model with so few positions has any.
    """
    positions = min(model.config.max_position_embeddings for model in (teacher, student))
    if positions < MIN_POSITIONS:
        return None
    num_tokens = min(TOKENS_PER_ROUND, max(2, positions // 2))
    token_ids = list(prompt[: min(PROMPT_TOKENS, positions - num_tokens)])
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for model, taken in zip((teacher, student), seconds, strict=True):
            taken += _decode_seconds(model, token_ids, num_tokens)
    of_teacher, of_student = map(statistics.median, seconds)
    return of_student / of_teacher


def _decode_seconds(model: Decoder, prompt: list[int], num_tokens: int) -> list[float]:
    engine = engine_for(model, [prompt], num_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    engine.add_request("draft", prompt, params)
    engine.step()  # the prompt, which makes the first token
    seconds = []
    while engine.has_unfinished():
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    return seconds
