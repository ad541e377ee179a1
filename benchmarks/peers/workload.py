"""The requests that every engine gets: token ids cut from running text, lengths from a seed."""

import math
import random
from dataclasses import dataclass

NUM_MIXED, NUM_SINGLE, NUM_PREFIX = 128, 8, 64
PREFIX_LEN, OWN_LEN, PREFIX_OUTPUT_LEN = 512, 32, 32
CONCURRENCY = 64


@dataclass(frozen=True)
class Workload:
    """What one measurement runs.

    Attributes:
        requests: prompt token ids and the number of tokens to answer, each.
        concurrency: so many are in flight, and each that ends is replaced at once.
        before: run to their end before the clock starts.
    """

    requests: list[tuple[list[int], int]]
    concurrency: int
    before: list[tuple[list[int], int]]


def workload(name: str, text: list[int], *, repeat: int) -> Workload:
    """The workload `name`, cut from the token ids `text`; a `repeat` has other prompts of the same lengths.

    mixed: log-normal lengths, medians of 135 tokens in and 85 out. single: its first requests, one at a time.
    prefix: one prefix of 512 tokens with 32 own ones, all at once. prefix-warm: the same after one request
    that had the prefix.
    """
    lengths, cut = random.Random("lengths"), random.Random(f"{name} {repeat}")

    def piece(length: int) -> list[int]:
        start = cut.randrange(len(text) - length)
        return text[start : start + length]

    if name in ("mixed", "single"):
        sizes = [
            (_log_normal(lengths, 135, 32, 384), _log_normal(lengths, 85, 16, 256)) for _ in range(NUM_MIXED)
        ]
        if name == "single":
            return Workload([(piece(n), out) for n, out in sizes[:NUM_SINGLE]], 1, [])
        return Workload([(piece(n), out) for n, out in sizes], CONCURRENCY, [])
    prefix = piece(PREFIX_LEN)
    requests = [(prefix + piece(OWN_LEN), PREFIX_OUTPUT_LEN) for _ in range(NUM_PREFIX)]
    return Workload(requests, CONCURRENCY, [(prefix + piece(8), 2)] if name == "prefix-warm" else [])


def _log_normal(generator: random.Random, median: int, low: int, high: int) -> int:
    """A length within bounds, drawn again until it is."""
    while True:
        length = round(generator.lognormvariate(math.log(median), 0.6))
        if low <= length <= high:
            return length
