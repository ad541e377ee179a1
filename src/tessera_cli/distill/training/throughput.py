"""Where the time of a step goes, and how much of the machine's arithmetic it uses."""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

import torch

from tessera_cli.distill.data.corpus import TrainBatch
from tessera_cli.models.config import ModelConfig

Phase = Literal["teacher", "student", "loss"]

# Dense tensor-core FLOP/s of bfloat16 and float16, and FLOP/s of plain float32, as the vendor states them.
_GPU_PEAKS = {
    "H200": (989e12, 67e12),
    "H100": (989e12, 67e12),
    "A100": (312e12, 19.5e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
}


@dataclass(frozen=True)
class Speed:
    """What a step took, under the names and in the units of `TrainStep`."""

    tokens_per_second: float
    supervised_tokens_per_second: float
    step_seconds: float
    teacher_seconds: float
    student_seconds: float
    loss_seconds: float
    padding_share: float
    model_flops_utilisation: float | None
    peak_memory_bytes: int


class StepMeter:
    """Measures steps of a student of `config`, computed in `dtype` by `num_processes` devices like `device`.

    On CUDA each border of a phase waits for the device.
    """

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, num_processes: int
    ) -> None:
        self._config, self._device, self._num_processes = config, device, num_processes
        self._peak = peak_flops(device, dtype)
        self._seconds: dict[Phase, float] = {}
        self._started = self._inner = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._seconds = {"teacher": 0.0, "student": 0.0, "loss": 0.0}
        self._started, self._inner = self._now(), 0.0

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """What is done in here counts as `name`, but for a phase in it."""
        start, outer, self._inner = self._now(), self._inner, 0.0
        try:
            yield
        finally:
            took = self._now() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + took - self._inner
            self._inner = outer + took

    def stop(self, batches: Sequence[TrainBatch], num_slots: float, *, teacher_flops: int) -> Speed:
        """End a step over `batches`, which took `num_slots` in attention and `teacher_flops` of a teacher.

        Model FLOPs utilisation (arXiv 2204.02311) is what the step needs by `forward_flops`, three times for
        the student, over what the devices can do in its time; what is computed twice counts once.
        """
        seconds = self._now() - self._started
        tokens = sum(len(batch.input_ids) for batch in batches)
        flops = 3 * forward_flops(self._config, batches) + teacher_flops
        peak = self._peak
        return Speed(
            tokens_per_second=tokens / seconds,
            supervised_tokens_per_second=sum(len(batch.target_ids) for batch in batches) / seconds,
            step_seconds=seconds,
            teacher_seconds=self._seconds["teacher"],
            student_seconds=self._seconds["student"],
            loss_seconds=self._seconds["loss"],
            padding_share=1 - tokens / num_slots,
            model_flops_utilisation=None if peak is None else flops / (seconds * peak * self._num_processes),
            peak_memory_bytes=peak_memory_bytes(self._device),
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def forward_flops(config: ModelConfig, batches: Sequence[TrainBatch]) -> int:
    """Floating-point operations of a forward pass over `batches`, the head on supervised tokens only.

    2 a multiplied weight and token, and in each layer 2 · num_heads · head_dim · length² for causal attention
    over a document.
    """
    tokens = sum(len(batch.input_ids) for batch in batches)
    supervised = sum(len(batch.target_ids) for batch in batches)
    squares = sum((end - start) ** 2 for batch in batches for start, end in pairwise(batch.cu_seqlens))
    head = config.vocab_size * config.hidden_size
    body = config.num_matmul_parameters - head
    attention = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return 2 * (body * tokens + head * supervised + attention * squares)


@cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s that the device can do in `dtype`: the vendor's figure, or on a CPU a measured one.

    A CPU is measured once, by the best of a few products of 1024 x 1024 matrices: a tenth of a second.
    None for a GPU whose figure is not known here.
    """
    if device.type == "cpu":
        return _product_rate(dtype)
    name = torch.cuda.get_device_name(device)
    known = next((peaks for gpu, peaks in _GPU_PEAKS.items() if gpu in name.split()), None)
    return None if known is None else known[dtype == torch.float32]


def _product_rate(dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    left, right = torch.ones(2, size, size, dtype=dtype)
    out = torch.empty_like(left)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def peak_memory_bytes(device: torch.device) -> int:
    """The most that the device's allocator has held, or on the CPU the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
