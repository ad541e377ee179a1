"""Load on an engine, and what it did under it: closed loop, or Poisson arrivals.

The figures carry vLLM's names. TTFT is submission to first token, queueing included; TPOT is
(E2EL − TTFT) / (output tokens − 1), undefined for one token; ITL is every gap between tokens. With a request
rate a request counts as submitted when it was due, so that neither a step under way nor a limit on requests
in flight can hide the wait.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tessera_cli.engine.engine import SequenceOutput
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.stats import EngineStats, RequestMetrics, percentile
from tessera_cli.errors import UsageError
from tessera_cli.serving.workload import BenchmarkRequest, poisson_arrivals

METRICS = ("ttft", "tpot", "itl", "e2el")


class BenchmarkEngine(Protocol):
    """What a benchmark needs of `engine.Engine`."""

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None: ...
    def step(self) -> list[SequenceOutput]: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class BenchmarkResult:
    """What one run measured. Token counts, throughputs and latencies are of the completed requests alone.

    `duration` is seconds from the first submission to the last end; `latencies` maps METRICS to seconds, one
    for each sample of a request. `prefix_cache_queries` and `prefix_cache_hits` count prompt tokens; `forks`
    counts samples that went on from a shared prompt, `block_copies` the blocks copied because one wrote.
    """

    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    duration: float
    max_concurrent_requests: int
    preemptions: int
    latencies: dict[str, list[float]]
    errors: list[str]
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    forks: int = 0
    block_copies: int = 0

    @property
    def request_throughput(self) -> float:
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        return self.total_output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        return (self.total_input_tokens + self.total_output_tokens) / self.duration

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Hits over queries; None where the prefix cache was never asked."""
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else None

    def percentile_ms(self, metric: str, percent: float) -> float | None:
        """Linearly interpolated percentile in milliseconds; None where nothing was measured."""
        values = self.latencies[metric]
        return percentile(values, percent) * 1000 if values else None

    def as_dict(self, percentiles: Sequence[float] = (50, 90, 99)) -> dict[str, Any]:
        """The result under vLLM's JSON keys, such as ``mean_ttft_ms`` and ``p99_itl_ms``."""
        result: dict[str, Any] = {
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "duration": self.duration,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_concurrent_requests": self.max_concurrent_requests,
            "preemptions": self.preemptions,
            "prefix_cache_queries": self.prefix_cache_queries,
            "prefix_cache_hits": self.prefix_cache_hits,
            "prefix_cache_hit_rate": self.prefix_cache_hit_rate,
            "forks": self.forks,
            "block_copies": self.block_copies,
        }
        for metric in METRICS:
            values = [seconds * 1000 for seconds in self.latencies[metric]]
            result[f"mean_{metric}_ms"] = statistics.fmean(values) if values else None
            result[f"median_{metric}_ms"] = self.percentile_ms(metric, 50)
            result[f"std_{metric}_ms"] = statistics.pstdev(values) if values else None
            for percent in percentiles:
                result[f"p{percent:g}_{metric}_ms"] = self.percentile_ms(metric, percent)
        return result


def run_benchmark(
    engine: BenchmarkEngine,
    requests: Sequence[BenchmarkRequest],
    *,
    concurrency: int | None,
    request_rate: float | None = None,
    seed: int = 0,
    on_step: Callable[[EngineStats], None] | None = None,
    on_finished: Callable[[list[RequestMetrics]], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> BenchmarkResult:
    """Put `requests` on an idle engine and measure until the last one has ended.

    Args:
        concurrency: at most this many requests are in flight, waiting ones included; None for no limit.
        request_rate: requests per second of a Poisson process; None to submit as soon as there is a place.
        seed: of the arrival times.
        on_finished: gets the times of the samples of each completed request, none of each that failed.

    Raises:
        UsageError: no request at all, or a limit or rate that lets none through.
    """
    if not requests:
        raise UsageError("a benchmark without requests", hint="give at least one")
    if concurrency is not None and concurrency < 1:
        raise UsageError(f"concurrency {concurrency} is below 1", hint="use 1 or more")
    load = _Load(engine, requests, poisson_arrivals(len(requests), request_rate, seed), concurrency, clock)
    before = engine.stats()
    while load.num_submitted < len(requests) or load.in_flight:
        load.submit_due()
        if not load.in_flight:
            sleep(load.seconds_to_next())
            continue
        for samples in load.step():
            if on_finished is not None:
                on_finished(samples)
        if on_step is not None:
            on_step(engine.stats())
    return load.result(before, engine.stats())


class _Load:
    """The requests of one run: which are due, in flight, completed or failed."""

    def __init__(
        self,
        engine: BenchmarkEngine,
        requests: Sequence[BenchmarkRequest],
        arrivals: list[float] | None,
        concurrency: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.engine, self.requests, self.clock = engine, requests, clock
        self.limit = len(requests) if concurrency is None else concurrency
        self.start = clock()
        self.due = None if arrivals is None else [self.start + seconds for seconds in arrivals]
        self.num_submitted = self.peak = 0
        # Unlike those of earlier runs on this engine, so that a trace of several tells them apart.
        before = engine.stats()
        self.first_id = before.num_finished + before.num_failed
        self.in_flight: dict[str, list[RequestMetrics]] = {}
        self.failures: dict[str, str] = {}
        self.completed: list[tuple[BenchmarkRequest, list[RequestMetrics]]] = []

    def submit_due(self) -> None:
        while self.num_submitted < len(self.requests) and len(self.in_flight) < self.limit:
            now = self.clock()
            arrival = now if self.due is None else self.due[self.num_submitted]
            if arrival > now:
                break
            request = self.requests[self.num_submitted]
            request_id = str(self.first_id + self.num_submitted)
            self.engine.add_request(request_id, request.prompt_token_ids, request.params)
            self.in_flight[request_id] = [RequestMetrics(arrival) for _ in range(request.params.n)]
            self.num_submitted += 1
        self.peak = max(self.peak, len(self.in_flight))

    def seconds_to_next(self) -> float:
        return 0.0 if self.due is None else max(0.0, self.due[self.num_submitted] - self.clock())

    def step(self) -> list[list[RequestMetrics]]:
        """One step of the engine; the samples' times of the requests that ended, none of each that failed.

        The times are the benchmark's own: its clock, and arrivals when they were due.
        """
        outputs = self.engine.step()
        now = self.clock()
        ended: list[list[RequestMetrics]] = []
        for output in outputs:
            request_id, samples = output.request_id, self.in_flight[output.request_id]
            times = samples[output.index]
            times.token_times.extend([now] * len(output.new_token_ids))
            if output.finish_reason is None:
                continue
            times.finished_time = now
            request = self.requests[int(request_id) - self.first_id]
            error = _failure(output, request, times)
            if error is not None:
                self.failures.setdefault(request_id, error)
            if all(sample.finished_time is not None for sample in samples):
                del self.in_flight[request_id]
                if request_id in self.failures:
                    ended.append([])
                else:
                    self.completed.append((request, samples))
                    ended.append(samples)
        return ended

    def result(self, before: EngineStats, after: EngineStats) -> BenchmarkResult:
        samples = [times for _, samples in self.completed for times in samples]
        return BenchmarkResult(
            completed=len(self.completed),
            failed=len(self.failures),
            total_input_tokens=sum(len(request.prompt_token_ids) for request, _ in self.completed),
            total_output_tokens=sum(len(times.token_times) for times in samples),
            duration=self.clock() - self.start,
            max_concurrent_requests=self.peak,
            preemptions=after.num_preemptions - before.num_preemptions,
            latencies=_latencies(samples),
            errors=list(self.failures.values()),
            prefix_cache_queries=after.prefix_cache_queries - before.prefix_cache_queries,
            prefix_cache_hits=after.prefix_cache_hits - before.prefix_cache_hits,
            forks=after.num_forks - before.num_forks,
            block_copies=after.num_block_copies - before.num_block_copies,
        )


def _failure(output: SequenceOutput, request: BenchmarkRequest, times: RequestMetrics) -> str | None:
    """Why a finished sample does not count: a short answer would otherwise look like a fast one."""
    wanted = request.params.max_tokens
    if output.error is not None:
        return output.error
    if output.finish_reason is not FinishReason.LENGTH or len(times.token_times) != wanted:
        return f"{len(times.token_times)} of {wanted} tokens, finish_reason {output.finish_reason}"
    return None


def _latencies(completed: Iterable[RequestMetrics]) -> dict[str, list[float]]:
    latencies: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for times in completed:
        latencies["itl"] += times.itl
        for metric, value in (("ttft", times.ttft), ("tpot", times.tpot), ("e2el", times.e2el)):
            if value is not None:
                latencies[metric].append(value)
    return latencies
