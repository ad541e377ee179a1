"""`tessera serve`: a model behind OpenAI's routes."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tessera_cli.cli import options
from tessera_cli.cli.loading import load_model, short_name
from tessera_cli.cli.output import Output
from tessera_cli.errors import UsageError
from tessera_cli.settings import Settings, prepare_process

if TYPE_CHECKING:
    from tessera_cli.serving.api.config import ServerConfig
    from tessera_cli.serving.api.server import Endpoint
    from tessera_cli.serving.async_llm import AsyncLLM


def serve(
    context: typer.Context,
    model_argument: options.ModelArgument = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any free port.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="What requests call the model; repeat it for several. [default: MODEL's last part]",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A key that requests may come with; repeat it for several. Better in $TESSERA_API_KEY, with "
            "commas between keys: other users of the machine see command lines.",
            show_default=False,
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web pages from there may call the server; * is any.",
            show_default=False,
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=1, metavar="N", help="Requests that may wait for their first token.")
    ] = 1024,
    request_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            metavar="SECONDS",
            help="In which an answer has to be whole. [default: none]",
            show_default=False,
        ),
    ] = None,
    max_body_size: Annotated[
        int,
        typer.Option(
            parser=options.size_option,
            metavar="SIZE",
            help="Of a request's body. [default: 4MiB]",
            show_default=False,
        ),
    ] = 4 << 20,
    drain_timeout: Annotated[
        int, typer.Option(min=0, metavar="SECONDS", help="For requests in flight once a signal has come.")
    ] = 30,
    stall_after: Annotated[
        float,
        typer.Option(min=0.1, metavar="SECONDS", help="Of one step, after which /health says 503."),
    ] = 60.0,
    ssl_certfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Speak TLS with this.", show_default=False)
    ] = None,
    ssl_keyfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate's key.", show_default=False)
    ] = None,
    access_log: Annotated[bool, typer.Option(help="One line of JSON for each request on stderr.")] = True,
    log_prompts: Annotated[bool, typer.Option(help="With the bodies of requests.")] = False,
    quiet: options.QuietOption = False,
    model_option: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    quantization: options.QuantizationOption = "auto",
    max_model_len: options.MaxModelLenOption = None,
    block_size: options.BlockSizeOption = 16,
    kv_cache_dtype: options.KvCacheDtypeOption = "auto",
    kv_cache_memory: options.KvCacheMemoryOption = None,
    gpu_memory_utilization: options.GpuMemoryUtilizationOption = 0.9,
    num_blocks: options.NumBlocksOption = None,
    max_num_seqs: options.MaxNumSeqsOption = 256,
    max_num_batched_tokens: options.MaxNumBatchedTokensOption = 2048,
    enable_chunked_prefill: options.ChunkedPrefillOption = True,
    enable_prefix_caching: options.PrefixCachingOption = True,
    scheduling_policy: options.SchedulingPolicyOption = "fcfs",
    attention_backend: options.AttentionBackendOption = "auto",
    enforce_eager: options.EnforceEagerOption = False,
    offline: options.OfflineOption = False,
    debug: options.DebugOption = False,
) -> None:
    """Serve a model to OpenAI's clients.

    \b
      tessera serve runs/RUN/export
      tessera serve runs/RUN/export --port 0 --served-model-name student

    The port answers at once, with 503 until the model is loaded. SIGTERM or Ctrl-C lets what is in flight end
    and exits 0; a second one exits at once. Each access line goes to stderr without prompts.
    """
    settings = Settings.from_env()
    output = Output.of(quiet=quiet)
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise UsageError("TLS needs a certificate and its key", hint="give --ssl-certfile and --ssl-keyfile")
    name = options.choose_model(model_argument, model_option, settings, output)
    keys = tuple(api_key or settings.api_keys)
    if not all(key.strip() for key in keys):
        raise UsageError("an API key is empty", hint="leave --api-key out to need none")
    prepare_process(offline=offline or settings.offline)
    from tessera_cli.serving.api.config import ServerConfig
    from tessera_cli.serving.api.server import Endpoint

    config = ServerConfig(
        model_names=tuple(served_model_name or (short_name(name),)),
        api_keys=keys,
        allowed_origins=tuple(allowed_origin or ()),
        max_body_size=max_body_size,
        request_timeout=request_timeout,
        log_prompts=log_prompts,
    )
    endpoint = Endpoint(host, port, ssl_certfile, ssl_keyfile, drain_timeout)

    def load() -> "Callable[[], AsyncLLM]":
        engine = options.engine_options(context)
        model = load_model(name, settings, output, offline=offline, engine=engine)
        from tessera_cli.serving.async_llm import AsyncLLM
        from tessera_cli.serving.token_bytes import TokenBytes

        token_bytes = TokenBytes.from_dir(model.path)
        llm = model.llm
        return lambda: AsyncLLM(
            llm.engine, llm.tokenizer, token_bytes, max_queue=max_queue, stall_after=stall_after
        )

    _run(load, config, endpoint, output, access_log=access_log)


def _run(
    load: "Callable[[], Callable[[], AsyncLLM]]",
    config: "ServerConfig",
    endpoint: "Endpoint",
    output: Output,
    *,
    access_log: bool,
) -> None:
    from tessera_cli.serving.api.server import serve

    endpoint.check_tls()
    with endpoint.bind() as bound, _access_log() if access_log else nullcontext():
        url = endpoint.url(bound)
        output.note(f"listening {url}, loading {config.model_names[0]}")

        def on_ready() -> None:
            output.note(f"ready     {url}/v1, the page at {url}/")

        serve(load, config, endpoint, bound, on_ready=on_ready)


@contextmanager
def _access_log() -> Iterator[None]:
    """Lines of JSON on stderr, whatever the log level; a line that cannot be written is lost."""
    from tessera_cli.serving.api.access_log import LOG

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOG.addHandler(handler)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.propagate = True
