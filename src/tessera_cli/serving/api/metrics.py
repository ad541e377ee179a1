"""Prometheus metrics, with vLLM's names behind `tessera:`."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tessera_cli.engine.sequence import FinishReason
from tessera_cli.serving.async_llm import AsyncLLM, Status
from tessera_cli.serving.outputs import CompletionOutput

_LATENCIES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_INTERVALS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class ServerMetrics:
    """Everything that `/metrics` tells of one server."""

    def __init__(self, current_llm: Callable[[], AsyncLLM | None]) -> None:
        """Read the engine through `current_llm` when somebody asks; None while there is none."""
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(_EngineCollector(current_llm))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tessera:{name}", text, buckets=buckets, registry=self.registry)

        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _LATENCIES)
        self._itl = histogram("inter_token_latency_seconds", "Between output tokens.", _INTERVALS)
        self._e2el = histogram("e2e_request_latency_seconds", "From arrival to the end.", _LATENCIES)
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first step.", _LATENCIES)
        self._output = histogram("request_generation_tokens", "Output tokens of a sample.", _TOKENS)
        self._success = Counter(
            "tessera:request_success",
            "Samples that ended, by reason.",
            ["finished_reason"],
            registry=self.registry,
        )
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._success.labels(reason.value)

    def observe(self, output: CompletionOutput) -> None:
        """Count a sample that has ended."""
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._success.labels(output.finish_reason.value).inc()
        self._output.observe(len(output.token_ids))
        metrics = output.metrics
        if metrics is None:
            return
        if metrics.ttft is not None:
            self._ttft.observe(metrics.ttft)
        if metrics.e2el is not None:
            self._e2el.observe(metrics.e2el)
        if metrics.first_scheduled_time is not None:
            self._queue.observe(max(0.0, metrics.first_scheduled_time - metrics.arrival_time))
        for interval in metrics.itl:
            self._itl.observe(interval)


class _EngineCollector(Collector):
    """The engine's own counts, as they are after its last step."""

    def __init__(self, current_llm: Callable[[], AsyncLLM | None]) -> None:
        self._current_llm = current_llm

    def collect(self) -> Iterator[Metric]:
        llm = self._current_llm()
        yield _gauge("ready", "1 once the model is loaded.", float(llm is not None))
        if llm is None:
            return
        stats, health = llm.stats, llm.health()
        used = stats.num_used_blocks
        gauges = {
            "healthy": ("1 while /health says 200.", float(health.status is Status.OK)),
            "num_requests_running": ("Sequences that hold KV blocks.", stats.num_running),
            "num_requests_waiting": ("Requests without their first token.", llm.num_waiting),
            "kv_cache_usage_perc": ("Share of the KV blocks in use, 0 to 1.", used / stats.num_blocks),
            "kv_blocks_total": ("KV blocks of the pool.", stats.num_blocks),
            "kv_blocks_free": ("KV blocks that nobody holds.", stats.num_blocks - used),
            "kv_blocks_cached": ("Free KV blocks that the prefix cache finds.", stats.num_cached_blocks),
        }
        counters = {
            "num_preemptions": ("Sequences that lost their blocks.", stats.num_preemptions),
            "prompt_tokens": ("Prompt tokens computed or found in the cache.", stats.prompt_tokens),
            "generation_tokens": ("Tokens sampled.", stats.generation_tokens),
            "prefix_cache_queries": ("Tokens looked up.", stats.prefix_cache_queries),
            "prefix_cache_hits": ("Tokens found.", stats.prefix_cache_hits),
            "forks": ("Samples made from another's prompt.", stats.num_forks),
            "cow_copies": ("Shared blocks copied for a writer.", stats.num_block_copies),
            "scheduler_steps": ("Steps of the engine.", stats.num_steps),
            "engine_faults": ("Steps that failed.", health.num_faults),
            "requests_rejected": ("Requests refused because the queue was full.", llm.num_rejected),
        }
        for name, (text, value) in gauges.items():
            yield _gauge(name, text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"tessera:{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"tessera:{name}", text, value=value)
