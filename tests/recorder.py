"""The stand-in for CUDA graphs on a CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from tessera_cli.engine.decode_graphs import DecodeGraphs
from tessera_cli.engine.engine import Engine
from tessera_cli.models.decoder import Decoder
from tests.engines import make_engine


class Recorder:
    """Captures as a device does: a result has one place, and the next replay may overwrite it.

    What runs again is `function` itself, over whatever its inputs hold by then.
    """

    def __init__(self) -> None:
        self.results: list[Tensor] = []
        self.replayed: list[int] = []  # rows

    def __call__(self, function: Callable[[], Tensor]) -> Callable[[], Tensor]:
        result = function().clone()
        self.results.append(result)

        def replay() -> Tensor:
            for other in self.results:
                other.fill_(torch.nan)
            self.replayed.append(len(result))
            return result.copy_(function())

        return replay


def engine_with_graphs(decoder: Decoder, **sizes: int) -> tuple[Engine, Recorder]:
    """An engine of these `sizes` over the reference kernel, and what replays its decode steps."""
    engine = make_engine(decoder, options={"attention_backend": "reference"}, **sizes)
    recorder = Recorder()
    runner = engine._runner
    with torch.inference_mode():
        runner.decode_graphs = DecodeGraphs(runner._forward, recorder, engine.config, decoder.device)
    return engine, recorder
