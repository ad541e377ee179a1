"""The processes that train one student together: one, or those that `accelerate launch` or torchrun started.

The recipe fixes what an optimiser step is; its micro-batches are dealt out to the processes. So the course of
a run, its weights up to the order of float32 sums, and its checkpoints do not depend on how many there are.
"""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    GradientAccumulationPlugin,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tessera_cli.distill.data.corpus import TrainBatch
from tessera_cli.distill.losses.student_loss import StudentLoss
from tessera_cli.errors import UsageError
from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.schema import Recipe
from tessera_cli.recipe.train_section import TrainSection

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)

Shared = TypeVar("Shared")


@dataclass(frozen=True, eq=False)
class Share:
    """A micro-batch that a process runs: its `number` in the step, and whether it `counts`.

    Every process runs as many, for they meet in each; one that has none left repeats one at weight zero.
    """

    number: int
    batch: TrainBatch
    counts: bool


class Processes:
    """This process among those of the run.

    Args:
        device: "cpu" or "cuda".
        trackers: where `log` sends figures, by accelerate's names.
        run_dir: where a tracker that writes files does so.

    Raises:
        UsageError: the device or a tracker is not there, or the launcher set up more than plain processes.
    """

    def __init__(self, device: str, *, trackers: Sequence[str] = (), run_dir: Path | None = None) -> None:
        missing = [name for name in trackers if importlib.util.find_spec(name) is None]
        if missing:
            raise UsageError(
                f"`train.trackers` names {missing[0]}, which is not installed",
                hint=f"`pip install {missing[0]}`, or leave it out",
            )
        # The plugin, unlike the plain argument, can not be overridden by accelerate's environment variables.
        self._accelerator = Accelerator(
            cpu=device == "cpu",
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
            log_with=list(trackers) or None,
            project_dir=run_dir,
        )
        kind = self._accelerator.distributed_type
        if kind not in _PLAIN:
            raise UsageError(
                f"the launcher asks for {kind.value}, which is not trained with",
                hint="launch plain processes; `train.data_parallel: fsdp2` shards the student",
            )
        self._trackers = tuple(trackers)
        self.device: torch.device = self._accelerator.device
        if self.device.type != torch.device(device).type:
            raise UsageError(
                f"device {device} is not available, only {self.device}", hint="use another device"
            )
        self.count: int = self._accelerator.num_processes
        self.rank: int = self._accelerator.process_index

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes and tells."""
        return self.rank == 0

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that these processes can not share.

        Raises:
            UsageError: micro-batches that can not be dealt out evenly, or a student that can not be sharded.
        """
        train, accumulation = recipe.train, recipe.train.gradient_accumulation_steps
        if accumulation % self.count:
            raise UsageError(
                f"{self.count} processes can not share the {accumulation} micro-batches of a step evenly",
                hint=f"set `train.gradient_accumulation_steps` to a multiple of {self.count}",
            )
        if train.data_parallel == "fsdp2" and self.count == 1:
            raise UsageError(
                "`train.data_parallel: fsdp2` shards the student over processes, and this is the only one",
                hint="start several: `accelerate launch --num_processes 2 -m tessera_cli distill run RECIPE`",
            )
        if train.data_parallel == "fsdp2" and recipe.loss.hidden.kind != "none":
            raise UsageError(
                "`loss.hidden` reads whole layers, which `train.data_parallel: fsdp2` shards",
                hint="set `train.data_parallel: ddp`",
            )

    def deal(self, batches: Sequence[TrainBatch]) -> list[Share]:
        """This process's part of a step, at least one micro-batch."""
        rounds = -(-len(batches) // self.count)
        numbers = [self.rank + turn * self.count for turn in range(rounds)]
        last = len(batches) - 1
        return [Share(min(i, last), batches[min(i, last)], i <= last) for i in numbers]

    def wrap(self, module: StudentLoss, train: TrainSection) -> nn.Module:
        """`module` with gradients that are the mean over all processes."""
        if train.data_parallel == "fsdp2":
            for layer in module.student.layers:
                fully_shard(layer)
            return _sharded_root(module)
        return self._accelerator.prepare(module)

    @contextmanager
    def gradients(self, module: nn.Module, *, complete: bool) -> Iterator[None]:
        """A forward and backward pass; only when `complete`, the last of a step, are gradients exchanged."""
        context: AbstractContextManager[Any] = nullcontext()
        if self.count > 1 and not complete and isinstance(module, nn.parallel.DistributedDataParallel):
            context = module.no_sync()
        with context:
            yield

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same in each."""
        return self._accelerator.reduce(tensor, reduction="sum")

    def agree(self, value: Shared) -> Shared:
        """The main process's `value`, in each; it is pickled."""
        return broadcast_object_list([value])[0] if self.count > 1 else value

    def share(self, values: Sequence[Shared]) -> Sequence[Shared]:
        """This process's part of `values`, which every process has."""
        return values[self.rank :: self.count]

    def gather(self, value: Shared) -> list[Shared]:
        """The values of all processes by their rank, in each; they are pickled."""
        return list(gather_object([value])) if self.count > 1 else [value]

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set in any of them."""
        return self.sum(torch.tensor(float(flag), device=self.device)).item() > 0 if self.count > 1 else flag

    def wait(self) -> None:
        """Go on when all processes are here."""
        self._accelerator.wait_for_everyone()

    def main_first(self) -> AbstractContextManager[None]:
        """What is in here the others do when the main process has done it."""
        return self._accelerator.main_process_first()

    @contextmanager
    def tracking(self, name: str, config: Mapping[str, Any], *, from_step: int) -> Iterator[None]:
        """In here `log` reaches the trackers, as the run `name` with its `config`, anew from a step on."""
        # Files keep what a run told before it was killed; what it tells again replaces that.
        options = {"tensorboard": {"purge_step": from_step}, "wandb": {"name": name}}
        kinds = {tracker: options[tracker] for tracker in options if tracker in self._trackers}
        self._accelerator.init_trackers("tessera", config=dict(config), init_kwargs=kinds)
        try:
            yield
        finally:
            self._accelerator.end_training()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send `values` to the trackers."""
        self._accelerator.log(dict(values), step=step)

    def reshard(self, student: Decoder) -> None:
        """Drop what a forward pass alone has gathered: it would outlive a change of the weights."""
        if isinstance(student, FSDPModule):
            student.reshard()

    @torch.no_grad()
    def whole_decoder(self, student: Decoder) -> Decoder:
        """`student`, or where it is sharded a whole copy of it on the CPU; all processes meet here."""
        if not any(isinstance(parameter, DTensor) for parameter in student.parameters()):
            return student
        copy = Decoder(student.config)
        weights = {name: whole(parameter).cpu() for name, parameter in student.named_parameters()}
        copy.load_state_dict(weights)
        return copy


def whole(tensor: Tensor) -> Tensor:
    """A tensor without its sharding; all processes meet here."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole `tensor` on the device of `like`, and sharded as it is; a copy."""
    tensor = tensor.to(like.device, copy=True)
    if not isinstance(like, DTensor) or tensor.ndim == 0:
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements)


def _sharded_root(module: StudentLoss) -> StudentLoss:
    # The decoder is the root, not what computes the loss with its head: evaluation runs it alone.
    fully_shard(module.student, reshard_after_forward=False)
    return module
