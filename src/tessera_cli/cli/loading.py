"""From a model's name and the engine options to an `LLM`, telling the user what was chosen."""

import gc
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tessera_cli.cli.output import Output
from tessera_cli.settings import Settings, prepare_process

if TYPE_CHECKING:
    from tessera_cli.engine.loading import EngineOptions
    from tessera_cli.models.causal_lm import CausalLMConfig
    from tessera_cli.serving.llm import LLM


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what "auto" came to; dtype and device are as torch names them."""

    name: str
    path: Path
    config: "CausalLMConfig"
    llm: "LLM"
    dtype: str
    quantization: str
    device: str
    attention_backend: str

    def title(self, command: str) -> list[str]:
        """What the live table says runs."""
        weights = "" if self.quantization == "none" else f" {self.quantization}"
        return [f"tessera {command}", self.name, f"{self.device} {self.dtype}{weights}"]

    def peak_memory_bytes(self) -> int:
        """The most memory taken so far: of the device's allocator on CUDA, else of the process."""
        import torch

        if self.device.startswith("cuda"):
            return torch.cuda.max_memory_allocated()
        # ru_maxrss is in KiB on Linux, in bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep the garbage collector from what is imported and loaded, which stays to the end, now and later.

    torch alone makes 170,000 objects. To look at them again and again takes a fifth of the start, and
    each full collection, the one at the exit among them, would look once more.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@_without_collections()
def load_model(
    name: str, settings: Settings, output: Output, *, offline: bool, engine: "EngineOptions"
) -> LoadedModel:
    """Resolve and load `name`; one line each on stderr for the model, the backend and the KV cache.

    Raises:
        ModelError: the model is missing, broken or of another architecture.
        UsageError: an engine option means nothing.
        CapacityError: the engine's sizes do not fit together.
    """
    offline = offline or settings.offline
    prepare_process(offline=offline)
    from tessera_cli.models.source import resolve_model

    path = resolve_model(name, home=settings.home, offline=offline, notify=output.note)

    from tessera_cli.engine.sizing import select_device
    from tessera_cli.models.loader import load_config, select_dtype, select_quantization
    from tessera_cli.serving.llm import LLM

    device = select_device(engine.get("device", "auto"))
    config = load_config(path)
    dtype = str(select_dtype(engine.get("dtype", "auto"), config.dtype, device)).removeprefix("torch.")
    quantization = select_quantization(engine.get("quantization", "auto"), config, path)
    weights = "" if quantization == "none" else f", {quantization} weights"
    size = f"{config.num_parameters / 1e6:,.1f} M parameters"
    output.note(f"model     {path}, {size}, {dtype} on {device}{weights}")
    llm = LLM(path, **engine | {"device": device, "dtype": dtype})
    backend, reason = llm.engine.attention_backend
    output.note(f"attention {backend}: {reason}")
    output.note(f"KV cache  {llm.engine.capacity}")
    for note in llm.engine.notes:
        output.note(f"note: {note}")
    return LoadedModel(short_name(name), path, config, llm, dtype, quantization, device, backend)


@contextmanager
def tracing(model: LoadedModel, path: Path | None) -> Iterator[None]:
    """Let the engine write what each step does to `path`, if there is one."""
    if path is None:
        yield
        return
    from tessera_cli.engine.trace import TraceWriter

    engine = model.llm.engine
    with TraceWriter.open(path, engine.config) as writer:
        engine.observer = writer
        try:
            yield
        finally:
            engine.observer = None


def short_name(name: str) -> str:
    """The last part of a model's name; of a run's export, the run."""
    path = Path(name)
    return path.parent.name if path.name == "export" and path.parent.name else path.name or name
