"""`tessera env`: what this installation is and what it would run on."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from tessera_cli import __version__
from tessera_cli.cli.options import DebugOption, JsonOption
from tessera_cli.cli.output import Output
from tessera_cli.errors import RunError
from tessera_cli.settings import Settings, prepare_process, relevant_variables

_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "llguidance",
    "safetensors",
    "huggingface-hub",
    "gguf",
    "pydantic",
    "typer",
)


def env(
    check: Annotated[
        bool, typer.Option("--check", help="Also generate a few tokens with a random tiny model.")
    ] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show versions, hardware, caches and variables.

    Made to be pasted into an issue: secrets in variables are masked.
    """
    output = Output.of(json=json)
    settings = Settings.from_env()
    prepare_process(offline=settings.offline)
    facts = environment(settings)
    if check:
        facts["check"] = generation_check()
    output.document(facts)
    for section, values in facts.items():
        output.data(f"{section}:")
        output.rows([(f"  {name}", str(value)) for name, value in values.items()] or [("  none",)])


def environment(settings: Settings) -> dict[str, dict[str, Any]]:
    """The facts in sections; memory in bytes is told in GiB."""
    import psutil
    import torch

    from tessera_cli.kernels.backend import select_backend

    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend, reason = select_backend("auto", device)
    memory = psutil.virtual_memory()
    return {
        "tessera": {
            "version": __version__,
            "python": f"{platform.python_version()} ({sys.executable})",
            "platform": platform.platform(),
        },
        "packages": {name: _version(name) for name in _PACKAGES},
        "hardware": {
            "cpu": f"{_cpu_name()}, {psutil.cpu_count(logical=False) or '?'} cores",
            "threads": torch.get_num_threads(),
            "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB free",
            "accelerators": ", ".join(_accelerators()) or "none",
            "device": device,
            "attention backend": f"{backend} ({reason})",
            "int8 weights": "compiled products" if backend == "cpu" else "products in plain PyTorch",
        },
        "files": {
            "cache": str(settings.home),
            "hub cache": _hub_cache(),
            "offline": "yes" if settings.offline else "no",
        },
        "variables": dict(relevant_variables()),
    }


def generation_check() -> dict[str, Any]:
    """Generate with a random model of two layers, in the engine.

    Raises:
        RunError: the engine did not finish or not with the tokens asked for.
    """
    import time

    import torch

    from tessera_cli.engine.config import EngineConfig
    from tessera_cli.engine.engine import Engine
    from tessera_cli.engine.sampling_params import SamplingParams
    from tessera_cli.models.config import ModelConfig
    from tessera_cli.models.decoder import Decoder

    config = ModelConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
        pad_token_id=None,
        dtype="float32",
    )
    started = time.monotonic()
    torch.manual_seed(0)
    engine = Engine(Decoder(config), EngineConfig(num_blocks=64, max_model_len=128))
    wanted = 16
    for i in range(4):
        engine.add_request(str(i), [1, 2, 3 + i], SamplingParams(temperature=0.0, max_tokens=wanted))
    generated = 0
    while engine.has_unfinished():
        for sequence in engine.step():
            if sequence.error is not None:
                raise RunError(f"the check failed: {sequence.error}")
            generated += len(sequence.new_token_ids)
    if generated != 4 * wanted:
        raise RunError(f"the check generated {generated} tokens, not {4 * wanted}")
    return {"generation": f"ok, {generated} tokens in {time.monotonic() - started:.2f} s"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    import torch

    found = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        found.append(f"{properties.name} ({properties.total_memory / 2**30:.0f} GiB)")
    return found


def _hub_cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return str(HF_HUB_CACHE)
