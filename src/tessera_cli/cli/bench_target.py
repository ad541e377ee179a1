"""Who answers the requests of `tessera bench`: an engine of one's own, or a server somewhere."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from tessera_cli.cli.bench_load import Load
from tessera_cli.cli.bench_load import Target as LoadTarget
from tessera_cli.cli.live import EngineView
from tessera_cli.cli.loading import LoadedModel
from tessera_cli.cli.server_view import as_stats
from tessera_cli.engine.stats import EngineStats
from tessera_cli.errors import UsageError
from tessera_cli.serving.server_request import ServerRequest
from tessera_cli.serving.workload import BenchmarkRequest, check_lengths

if TYPE_CHECKING:
    from tessera_cli.serving.benchmark_result import BenchmarkResult
    from tessera_cli.serving.openai_server import Server

# Random token ids for a model whose vocabulary nobody tells; all common ones are larger.
SERVER_VOCAB_SIZE = 10_001


class Target(LoadTarget, Protocol):
    """What a benchmark needs of who answers."""

    title: list[str]

    def prepare(self, requests: Sequence[ServerRequest]) -> list[ServerRequest]:
        """The requests as they will be run; refuses, with a UsageError, what cannot be."""
        ...

    def stats(self) -> EngineStats: ...

    def run(
        self, requests: Sequence[ServerRequest], load: Load, concurrency: int | None, view: EngineView | None
    ) -> "BenchmarkResult":
        """Measure one run; `view` is shown meanwhile."""
        ...

    def describe(self) -> dict[str, Any]:
        """Who answers: `backend`, `model_id` and what belongs to `config`, `versions` and `device`."""
        ...


class EngineTarget:
    """An engine in this process."""

    takes_messages: bool

    def __init__(self, model: LoadedModel) -> None:
        self.model, self.engine = model, model.llm.engine
        self.title = model.title("bench")
        self.vocab_size = model.config.vocab_size
        self.max_model_len: int | None = self.engine.config.max_model_len
        self.takes_messages = model.llm.tokenizer.chat_template is not None

    def count_tokens(self, text: str) -> int:
        return len(self.model.llm.tokenizer.encode(text))

    def prepare(self, requests: Sequence[ServerRequest]) -> list[ServerRequest]:
        """The same with token ids as prompts.

        Raises:
            CapacityError: a request is longer than the model allows.
            UsageError: a random token is none of the model's.
        """
        prepared = [replace(one, prompt=self._token_ids(one)) for one in requests]
        greatest = max(max(one.token_ids, default=0) for one in prepared)
        if greatest >= self.vocab_size:
            raise UsageError(
                f"token {greatest} is outside the model's {self.vocab_size:,}", hint="lower --vocab-size"
            )
        check_lengths(_for_engine(prepared), self.engine.config.max_model_len)
        return prepared

    def _token_ids(self, request: ServerRequest) -> list[int]:
        tokenizer = self.model.llm.tokenizer
        if isinstance(request.prompt, str):
            return tokenizer.encode(request.prompt)
        if request.messages is not None:
            return tokenizer.encode_chat(request.messages, add_generation_prompt=True)
        return request.token_ids

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def run(
        self, requests: Sequence[ServerRequest], load: Load, concurrency: int | None, view: EngineView | None
    ) -> "BenchmarkResult":
        from tessera_cli.serving.benchmark import run_benchmark

        # Neither the warm-up nor an earlier run of the same prompts may make this one cheaper.
        self.engine.reset_prefix_cache()
        return run_benchmark(
            self.engine,
            _for_engine(requests),
            concurrency=concurrency,
            request_rate=load.request_rate,
            burstiness=load.burstiness,
            seed=load.seed,
            on_step=None if view is None else view.on_step,
            on_finished=None if view is None else view.on_finished,
        )

    def describe(self) -> dict[str, Any]:
        import torch

        model, engine = self.model, self.engine.config
        on_cuda = model.device.startswith("cuda")
        return {
            "backend": "tessera",
            "model_id": str(model.path),
            "config": {
                "model": str(model.path),
                "dtype": model.dtype,
                "quantization": model.quantization,
                "attention_backend": model.attention_backend,
                **asdict(engine),
                "kv_cache_dtype": str(engine.kv_cache_dtype),
            },
            "versions": {"torch": str(torch.__version__), "transformers": version("transformers")},
            "device": {
                "type": model.device,
                "name": torch.cuda.get_device_name(model.device) if on_cuda else platform.machine(),
                "num_cpus": os.cpu_count(),
                "num_threads": torch.get_num_threads(),
            },
        }


class ServerTarget:
    """A server with OpenAI's routes."""

    vocab_size = SERVER_VOCAB_SIZE
    max_model_len: int | None = None
    takes_messages = True

    def __init__(self, server: "Server") -> None:
        self.server = server
        self.title = ["tessera bench", server.model, server.url]

    def count_tokens(self, text: str) -> int:
        raise UsageError("without a model no answer's tokens can be counted", hint="give --output-len")

    def prepare(self, requests: Sequence[ServerRequest]) -> list[ServerRequest]:
        for one in requests:
            one.body(self.server.model)
        return list(requests)

    def stats(self) -> EngineStats:
        from tessera_cli.serving.server_load import ServerProgress

        return as_stats(ServerProgress())

    def run(
        self, requests: Sequence[ServerRequest], load: Load, concurrency: int | None, view: EngineView | None
    ) -> "BenchmarkResult":
        from tessera_cli.serving.server_benchmark import run_server_benchmark

        return run_server_benchmark(
            self.server,
            requests,
            concurrency=concurrency,
            request_rate=load.request_rate,
            burstiness=load.burstiness,
            seed=load.seed,
            on_progress=None if view is None else lambda progress: view.on_step(as_stats(progress)),
            on_finished=None if view is None else view.on_finished,
        )

    def describe(self) -> dict[str, Any]:
        return {
            "backend": "openai",
            "model_id": self.server.model,
            "config": {"base_url": self.server.url},
            "versions": {},
            "device": {"num_cpus": os.cpu_count()},
        }


def _for_engine(requests: Sequence[ServerRequest]) -> list[BenchmarkRequest]:
    return [BenchmarkRequest(one.token_ids, one.params) for one in requests]
