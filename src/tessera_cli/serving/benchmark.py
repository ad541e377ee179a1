"""Load on an engine, and what it did under it: closed loop, or arrivals at random times.

The figures carry vLLM's names. TTFT is submission to first token, queueing included; TPOT is
(E2EL − TTFT) / (output tokens − 1), undefined for one token; ITL is every gap between tokens. With a request
rate a request counts as submitted when it was due, so that neither a step under way nor a limit on requests
in flight can hide the wait.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tessera_cli.engine.engine import SequenceOutput
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.sequence import FinishReason
from tessera_cli.engine.stats import EngineStats, RequestMetrics
from tessera_cli.serving.benchmark_result import BenchmarkResult, busiest_second, distributions, slowest
from tessera_cli.serving.workload import BenchmarkRequest, check_load, gamma_arrivals


class BenchmarkEngine(Protocol):
    """What a benchmark needs of `engine.Engine`."""

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None: ...
    def step(self) -> list[SequenceOutput]: ...
    def stats(self) -> EngineStats: ...


def run_benchmark(
    engine: BenchmarkEngine,
    requests: Sequence[BenchmarkRequest],
    *,
    concurrency: int | None,
    request_rate: float | None = None,
    burstiness: float = 1.0,
    seed: int = 0,
    on_step: Callable[[EngineStats], None] | None = None,
    on_finished: Callable[[list[RequestMetrics]], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> BenchmarkResult:
    """Put `requests` on an idle engine and measure until the last one has ended.

    Args:
        concurrency: at most this many requests are in flight, waiting ones included; None for no limit.
        request_rate: requests per second on average; None to submit as soon as there is a place.
        burstiness: of the arrivals, as `workload.gamma_arrivals` has it.
        seed: of the arrival times.
        on_finished: gets the times of the samples of each completed request, none of each that failed.

    Raises:
        UsageError: no request at all, or a limit or rate that lets none through.
    """
    check_load(len(requests), concurrency)
    arrivals = gamma_arrivals(len(requests), request_rate, seed, burstiness=burstiness)
    load = _Load(engine, requests, arrivals, concurrency, clock)
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
        self.token_ids: dict[tuple[int, int], list[int]] = {}

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
            times, number = samples[output.index], int(request_id) - self.first_id
            self.token_ids.setdefault((number, output.index), []).extend(output.new_token_ids)
            times.token_times.extend([now] * len(output.new_token_ids))
            if output.finish_reason is None:
                continue
            times.finished_time = now
            request = self.requests[number]
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
        duration = self.clock() - self.start
        samples = [times for _, samples in self.completed for times in samples]
        token_times = [time for times in samples for time in times.token_times]
        return BenchmarkResult(
            completed=len(self.completed),
            errors=list(self.failures.values()),
            total_input_tokens=sum(len(one.prompt_token_ids) for one, _ in self.completed),
            total_output_tokens=len(token_times),
            duration=duration,
            max_concurrent_requests=self.peak,
            max_output_tokens_per_s=busiest_second(token_times, self.start),
            preemptions=after.num_preemptions - before.num_preemptions,
            latencies=distributions(samples),
            slowest=[slowest(samples) for _, samples in self.completed],
            prefix_cache_queries=after.prefix_cache_queries - before.prefix_cache_queries,
            prefix_cache_hits=after.prefix_cache_hits - before.prefix_cache_hits,
            forks=after.num_forks - before.num_forks,
            block_copies=after.num_block_copies - before.num_block_copies,
            output_sha256=self._output_sha256(),
        )

    def _output_sha256(self) -> str:
        ordered = [self.token_ids[key] for key in sorted(self.token_ids)]
        return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()


def _failure(output: SequenceOutput, request: BenchmarkRequest, times: RequestMetrics) -> str | None:
    """Why a finished sample does not count: a short answer would otherwise look like a fast one."""
    wanted = request.params.max_tokens
    if output.error is not None:
        return output.error
    if output.finish_reason is not FinishReason.LENGTH or len(times.token_times) != wanted:
        return f"{len(times.token_times)} of {wanted} tokens, finish_reason {output.finish_reason}"
    return None
