"""What a benchmark asks of an engine: prompts, output lengths and arrival times, all from a seed."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import CapacityError, UsageError

DEFAULT_CONCURRENCY = 64
MIN_RATE, MAX_RATE = 1e-6, 1e9  # requests per second
MIN_BURSTINESS, MAX_BURSTINESS = 1e-3, 1e6
NANO_LEAST, NANO_LAST_ID = 100, 10_000


@dataclass(frozen=True)
class BenchmarkRequest:
    """A prompt and how to answer it; `params.max_tokens` is the output length, as end tokens are ignored."""

    prompt_token_ids: list[int]
    params: SamplingParams


def random_requests(
    num_requests: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float,
    vocab_size: int,
    seed: int,
    prefix_len: int = 0,
    num_prefixes: int = 1,
    long_input_len: int | None = None,
) -> list[BenchmarkRequest]:
    """Requests of random token ids, answered greedily and in full.

    Args:
        prefix_len: tokens that come before a prompt's own.
        num_prefixes: how many such beginnings there are; prompts take them in turn.
        long_input_len: own prompt tokens of the last request, instead of `input_len`.

    Raises:
        UsageError: a length that means nothing, or `range_ratio` outside [0, 1).
    """
    check_prefix_len(prefix_len)
    # Apart from the lengths, so that the same lengths can be had without the ids.
    generator = random.Random(f"token ids {seed}")

    def token_ids(count: int) -> list[int]:
        return [generator.randrange(vocab_size) for _ in range(count)]

    prefixes = [token_ids(prefix_len) for _ in range(num_prefixes)]
    lengths = list(
        random_lengths(
            num_requests, input_len=input_len, output_len=output_len, range_ratio=range_ratio, seed=seed
        )
    )
    if long_input_len is not None and lengths:
        lengths[-1] = long_input_len, lengths[-1][1]
    return [
        BenchmarkRequest(prefixes[index % num_prefixes] + token_ids(num_in), greedy(num_out))
        for index, (num_in, num_out) in enumerate(lengths)
    ]


def nano_requests(
    num_requests: int, *, input_len: int, output_len: int, vocab_size: int, seed: int
) -> list[BenchmarkRequest]:
    """The requests of nano-vllm's benchmark: 256 of up to 1,024 tokens each way, from seed 0, are its own.

    Lengths are uniform from NANO_LEAST to `input_len` and `output_len`, token ids from 0 to NANO_LAST_ID.
    Every length and id comes from one generator, all prompts before all output lengths.

    Raises:
        UsageError: a greatest length below the least, or a vocabulary that lacks some of the ids.
    """
    if min(input_len, output_len) < NANO_LEAST:
        raise UsageError(
            f"nano requests of up to {input_len} tokens in and {output_len} out",
            hint=f"their lengths begin at {NANO_LEAST}",
        )
    if vocab_size <= NANO_LAST_ID:
        raise UsageError(
            f"nano requests have token ids up to {NANO_LAST_ID:,}, and the vocabulary has {vocab_size:,}",
            hint="use random requests",
        )
    generator = random.Random(seed)
    prompts = []
    for _ in range(num_requests):
        num_in = generator.randint(NANO_LEAST, input_len)
        prompts.append([generator.randint(0, NANO_LAST_ID) for _ in range(num_in)])
    return [BenchmarkRequest(ids, greedy(generator.randint(NANO_LEAST, output_len))) for ids in prompts]


def random_lengths(
    num_requests: int, *, input_len: int, output_len: int, range_ratio: float, seed: int
) -> Iterator[tuple[int, int]]:
    """Tokens in and out of each request, one after the other.

    Both are uniform between ``length * (1 - range_ratio)`` and ``length * (1 + range_ratio)``, at least 1;
    this is what vLLM's `--random-range-ratio` means.

    Raises:
        UsageError: a length below 1, or `range_ratio` outside [0, 1).
    """
    if input_len < 1 or output_len < 1:
        raise UsageError(f"a benchmark of {input_len} tokens in and {output_len} out", hint="use 1 or more")
    check_range_ratio(range_ratio)
    generator = random.Random(seed)

    def length(mean: int) -> int:
        return generator.randint(max(1, int(mean * (1 - range_ratio))), int(mean * (1 + range_ratio)))

    return ((length(input_len), length(output_len)) for _ in range(num_requests))


def greedy(output_len: int) -> SamplingParams:
    """Exactly `output_len` tokens, each the likeliest."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


def check_lengths(requests: Iterable[BenchmarkRequest], max_model_len: int) -> None:
    """Refuse, before any work, a request that is longer than the model allows.

    Raises:
        CapacityError: the longest request needs more than `max_model_len` tokens.
    """
    longest = max(requests, key=lambda request: len(request.prompt_token_ids) + request.params.max_tokens)
    num_prompt, num_output = len(longest.prompt_token_ids), longest.params.max_tokens
    if num_prompt + num_output > max_model_len:
        raise CapacityError(
            f"a request of {num_prompt} tokens in and {num_output} out is longer than {max_model_len} tokens",
            hint="lower --input-len, --output-len or --range-ratio, or raise --max-model-len",
        )


def gamma_arrivals(
    num_requests: int, rate: float | None, seed: int, *, burstiness: float = 1.0
) -> list[float] | None:
    """Seconds after the start at which requests are due: the first at 0, then gaps of mean 1/rate.

    The gaps are gamma distributed with shape `burstiness`, as vLLM's `--burstiness` has it: 1 is a Poisson
    process, less comes in bursts, more is steadier. None without a rate: a request is due when there is a
    place for it.

    Raises:
        UsageError: a rate or a burstiness that is not a positive, finite number.
    """
    check_burstiness(burstiness)
    if rate is None:
        return None
    check_rate(rate)
    generator = random.Random(seed)
    gaps = (generator.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(num_requests - 1))
    return list(accumulate(gaps, initial=0.0))


def check_load(num_requests: int, concurrency: int | None) -> None:
    """Refuse, with a UsageError, a load of no requests, or one that lets none through."""
    if not num_requests:
        raise UsageError("a benchmark without requests", hint="give at least one")
    if concurrency is not None and concurrency < 1:
        raise UsageError(f"concurrency {concurrency} is below 1", hint="use 1 or more")


def check_range_ratio(range_ratio: float) -> None:
    """Refuse, with a UsageError, a spread that could make a length zero or negative."""
    if not 0 <= range_ratio < 1:
        raise UsageError(f"range ratio {range_ratio} is outside [0, 1)", hint="0 makes all lengths equal")


def check_rate(rate: float) -> None:
    """Refuse, with a UsageError, a request rate at which times mean nothing: zero, years apart, infinite."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise UsageError(
            f"request rate {rate} is outside {MIN_RATE:g} to {MAX_RATE:g}", hint="per second, such as 2.5"
        )


def check_burstiness(burstiness: float) -> None:
    """Refuse, with a UsageError, a burstiness that makes no gaps: all are as good as zero, or as equal."""
    if not MIN_BURSTINESS <= burstiness <= MAX_BURSTINESS:
        raise UsageError(
            f"burstiness {burstiness} is outside {MIN_BURSTINESS:g} to {MAX_BURSTINESS:g}",
            hint="1 is a Poisson process, less is burstier",
        )


def check_prefix_len(prefix_len: int) -> None:
    """Refuse, with a UsageError, a shared prefix of less than no tokens."""
    if prefix_len < 0:
        raise UsageError(f"a shared prefix of {prefix_len} tokens", hint="use 0 or more")
