"""`--preset`: named loads, each a set of the options of `tessera bench`; what is given beside it wins."""

from enum import StrEnum
from typing import Annotated, Any

import typer


class Preset(StrEnum):
    """Loads that engines are compared by."""

    NANO = "nano"
    SERVE = "serve"
    PREFIX = "prefix"
    INTERFERE = "interfere"
    PRESSURE = "pressure"


PRESETS: dict[Preset, dict[str, Any]] = {
    # The benchmark of nano-vllm: 142,827 tokens in, 133,966 out, all at once.
    Preset.NANO: {
        "dataset": "nano",
        "num_prompts": 256,
        "input_len": 1024,
        "output_len": 1024,
        "temperature": 0.6,
        "concurrency": "256",
        "num_warmups": 1,
    },
    # From one user to more than are served at once, with bounds that an interactive service has.
    Preset.SERVE: {
        "input_len": 512,
        "output_len": 128,
        "concurrency": "1,8,64,256",
        "goodput": ["ttft:1000", "tpot:50"],
    },
    # 64 system prompts, each in front of 16 questions.
    Preset.PREFIX: {
        "num_prefixes": 64,
        "num_prompts": 1024,
        "prefix_len": 2048,
        "input_len": 128,
        "output_len": 256,
        "concurrency": "64",
    },
    # What a long prompt does to those who are being answered: their longest gap is p100 ITL.
    Preset.INTERFERE: {
        "num_prompts": 17,
        "input_len": 32,
        "long_input_len": 4096,
        "output_len": 256,
        "concurrency": "17",
        "percentiles": "50,99,100",
    },
    # A pool for a third of what is in flight, so that sequences are preempted.
    Preset.PRESSURE: {
        "num_prompts": 128,
        "input_len": 64,
        "output_len": 128,
        "concurrency": "64",
        "num_blocks": 257,
        "max_model_len": 1024,
    },
}


def _apply(context: typer.Context, preset: Preset | None) -> Preset | None:
    """Make the preset's values the defaults of the options that follow."""
    if preset is not None:
        context.default_map = PRESETS[preset]
    return preset


PresetOption = Annotated[
    Preset | None,
    typer.Option(
        callback=_apply,
        is_eager=True,
        help="A named load; options given beside it win. nano: nano-vllm's benchmark. serve: 512 tokens in, "
        "128 out, 1 to 256 at once. prefix: 64 prefixes of 2048 tokens. interfere: 16 answers and a prompt "
        "of 4096. pressure: a pool too small for all.",
        show_default=False,
    ),
]
