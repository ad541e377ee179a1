"""The load of a benchmark on a server, and what its client sees: the counterpart of `benchmark`.

The client's own work, all in one process, is in the figures. Latencies are those of `streamed_answer`; tokens
are counted by the server.
"""

from collections.abc import Callable, Sequence

from tessera_cli.errors import RunError
from tessera_cli.serving.benchmark_result import BenchmarkResult, distributions, slowest
from tessera_cli.serving.openai_server import Server
from tessera_cli.serving.server_load import ServerLoad, ServerProgress
from tessera_cli.serving.server_request import ServerRequest
from tessera_cli.serving.streamed_answer import StreamedAnswer, StreamedSample
from tessera_cli.serving.workload import check_load, gamma_arrivals


def run_server_benchmark(
    server: Server,
    requests: Sequence[ServerRequest],
    *,
    concurrency: int | None,
    request_rate: float | None = None,
    burstiness: float = 1.0,
    seed: int = 0,
    on_progress: Callable[[ServerProgress], None] | None = None,
    on_finished: Callable[[list[StreamedSample]], None] | None = None,
) -> BenchmarkResult:
    """Put `requests` on a server and measure until the last one has ended; arguments as `run_benchmark`.

    Raises:
        UsageError: no request at all, or a limit or rate that lets none through.
    """
    check_load(len(requests), concurrency)
    completed: dict[int, StreamedAnswer] = {}
    failures: dict[int, str] = {}

    def on_answer(index: int, answer: StreamedAnswer | RunError) -> None:
        error = answer.message if isinstance(answer, RunError) else _failure(answer, requests[index])
        if isinstance(answer, RunError) or error is not None:
            failures[index] = error or ""
        else:
            completed[index] = answer
        if on_finished is not None:
            on_finished(completed[index].samples if index in completed else [])

    load = ServerLoad(
        server,
        requests,
        limit=concurrency or len(requests),
        arrivals=gamma_arrivals(len(requests), request_rate, seed, burstiness=burstiness),
        on_answer=on_answer,
    )
    duration = load.run(on_progress)
    answers = completed.values()
    return BenchmarkResult(
        completed=len(answers),
        errors=[failures[index] for index in sorted(failures)],
        total_input_tokens=sum(answer.num_prompt_tokens for answer in answers),
        total_output_tokens=sum(answer.num_output_tokens for answer in answers),
        duration=duration,
        max_concurrent_requests=load.progress.peak,
        preemptions=None,
        latencies=distributions(sample for answer in answers for sample in answer.samples),
        slowest=[slowest(answer.samples) for answer in answers],
        prefix_cache_queries=None,
        prefix_cache_hits=None,
    )


def _failure(answer: StreamedAnswer, request: ServerRequest) -> str | None:
    """Why an answer does not count: a short one would otherwise look like a fast one.

    Where it counts, each sample is as long as was asked for.
    """
    wanted, num_samples = request.params.max_tokens, len(answer.samples)
    reasons = sorted({str(sample.finish_reason) for sample in answer.samples})
    if reasons != ["length"] or answer.num_output_tokens != wanted * num_samples:
        told = f"{answer.num_output_tokens} of {wanted * num_samples} tokens"
        return f"{told}, finish_reason {', '.join(reasons)}"
    for sample in answer.samples:
        sample.num_tokens = wanted
    return None
