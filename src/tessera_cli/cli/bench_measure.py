"""The loads of `tessera bench`, measured one after the other and shown live."""

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tessera_cli.cli.bench_load import Load, prompts_sha256
from tessera_cli.cli.bench_run import BenchRun, Compared
from tessera_cli.cli.bench_target import EngineTarget, ServerTarget, Target
from tessera_cli.cli.live import EngineView
from tessera_cli.cli.output import Output
from tessera_cli.errors import RunError, UsageError
from tessera_cli.serving.server_request import ServerRequest
from tessera_cli.serving.workload import BenchmarkRequest, greedy
from tessera_cli.settings import Settings

if TYPE_CHECKING:
    from tessera_cli.serving.baseline import TransformersBaseline
    from tessera_cli.serving.benchmark_result import BenchmarkResult


@dataclass
class Measuring:
    """How to measure: what to compare with, and how to show it.

    `baseline` is "transformers" (its model is loaded at first use), a server, or None; `bounds` are those of
    goodput, in milliseconds by metric.
    """

    baseline: "str | ServerTarget | None"
    bounds: dict[str, float]
    output: Output
    live: bool
    log_interval: float
    _transformers: "TransformersBaseline | None" = None

    def measure(self, target: Target, load: Load, levels: Sequence[int | None]) -> list[BenchRun]:
        """Measure `load` at each concurrency of `levels`.

        Raises:
            UsageError: the load cannot be made, or not compared with the baseline; before anything is run.
            RunError: the baseline failed.
        """
        asked = [load.requests(target, concurrency, self.output) for concurrency in levels]
        work = [target.prepare(requests) for requests in asked]
        if self.baseline == "transformers":
            _check_plain(work)
        runs = []
        for concurrency, wanted, requests in zip(levels, asked, work, strict=True):
            warmups = load.warmups(target, wanted, concurrency)
            if warmups:
                self.output.note(f"warm-up   {len(warmups)} requests")
                _run_warmups(target, target.prepare(warmups), load, concurrency)
            repeats = [self._shown(target, requests, load, concurrency) for _ in range(load.repeat)]
            compared = self._compare(target, requests, load, concurrency)
            about = _describe(target, load, wanted, len(warmups))
            runs.append(BenchRun(concurrency, repeats, compared, about, self.bounds))
        return runs

    def _shown(
        self, target: Target, requests: Sequence[ServerRequest], load: Load, concurrency: int | None
    ) -> "BenchmarkResult":
        view = None
        if not self.output.is_quiet:
            view = EngineView(
                self.output.console,
                live=self.live,
                title=target.title,
                num_requests=len(requests),
                start=target.stats(),
                log_interval=self.log_interval,
            )
        with view or nullcontext():
            return target.run(requests, load, concurrency, view)

    def _compare(
        self, target: Target, requests: Sequence[ServerRequest], load: Load, concurrency: int | None
    ) -> Compared | None:
        if self.baseline is None:
            return None
        if isinstance(self.baseline, ServerTarget):
            self.output.note(f"baseline  {self.baseline.server.url}")
            return _by_server(self.baseline, requests, load, concurrency)
        assert isinstance(target, EngineTarget)
        batch_size = min(concurrency or len(requests), len(requests))
        self.output.note(f"baseline  transformers, batches of {batch_size}")
        if self._transformers is None:
            from tessera_cli.serving.baseline import TransformersBaseline

            model = target.model
            self._transformers = TransformersBaseline(model.path, dtype=model.dtype, device=model.device)
        result = self._transformers.run(
            [BenchmarkRequest(one.token_ids, one.params) for one in requests], batch_size=batch_size
        )
        return Compared(
            "transformers",
            result.output_throughput,
            {
                "batch_size": batch_size,
                "duration": result.duration,
                "total_output_tokens": result.total_output_tokens,
            },
        )


def find_baseline(text: str | None, base_url: str | None, settings: Settings) -> "str | ServerTarget | None":
    """What `--baseline` names.

    Raises:
        UsageError: nothing, or what cannot be compared with.
    """
    if text is None:
        return None
    if text == "transformers":
        if base_url is not None:
            raise UsageError(
                "--baseline transformers needs the model itself",
                hint="leave --base-url out, or give a URL",
            )
        return text
    if "://" not in text:
        raise UsageError(f"--baseline {text!r} is neither transformers nor a server's address")
    from tessera_cli.serving.openai_server import Server

    return ServerTarget(Server.find(text, model=None, api_key=next(iter(settings.api_keys), None)))


def _run_warmups(
    target: Target, warmups: Sequence[ServerRequest], load: Load, concurrency: int | None
) -> None:
    """Run what is not measured; a server or model that fails already here fails the benchmark.

    Raises:
        RunError: a request failed.
    """
    result = target.run(warmups, replace(load, request_rate=None), concurrency, None)
    if result.errors:
        raise RunError(f"{result.failed} of {len(warmups)} warm-up requests failed: {result.errors[0]}")


def _by_server(
    baseline: ServerTarget, requests: Sequence[ServerRequest], load: Load, concurrency: int | None
) -> Compared:
    baseline.prepare(requests)
    result = baseline.run(requests, load, concurrency, None)
    if result.errors:
        raise RunError(f"{result.failed} requests failed at the baseline: {result.errors[0]}")
    return Compared(baseline.server.url, result.output_throughput, result.as_dict())


def _check_plain(work: Sequence[Sequence[ServerRequest]]) -> None:
    if any(one.params != greedy(one.params.max_tokens) for requests in work for one in requests):
        raise UsageError(
            "--baseline transformers compares one greedy answer to each prompt only",
            hint="leave --n and --temperature out, and sampling fields but max_tokens out of the prompt file",
        )


def _describe(
    target: Target, load: Load, requests: Sequence[ServerRequest], num_warmups: int
) -> dict[str, Any]:
    """What was run on what, so that a result can be read and repeated on its own."""
    about = target.describe()
    return {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": about["backend"],
        "model_id": about["model_id"],
        "num_prompts": len(requests),
        "request_rate": "inf" if load.request_rate is None else load.request_rate,
        "burstiness": load.burstiness,
        "config": about["config"]
        | load.as_dict()
        | {
            "num_prompts": len(requests),
            "num_warmups": num_warmups,
            "prompts_sha256": prompts_sha256(requests),
        },
        "versions": {"tessera": version("tessera-cli"), "python": platform.python_version()}
        | about["versions"],
        "device": about["device"],
    }
