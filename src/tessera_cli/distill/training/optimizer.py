"""How the student's weights move: AdamW, its learning rate, and the scale of a float16 loss."""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from tessera_cli.distill.training.average import WeightAverage
from tessera_cli.distill.training.checkpoint import LossScale, TrainerState
from tessera_cli.distill.training.processes import sharded_like, whole
from tessera_cli.errors import UsageError
from tessera_cli.recipe.train_section import TrainSection

BETAS = (0.9, 0.95)
EPS = 1e-8


class StudentOptimizer:
    """All that moves in a run: the trained weights, AdamW's moments, their average, the loss scale.

    Args:
        parameters: what is trained, by name; float32, perhaps sharded.
        train: the recipe's optimisation.
        num_steps: the length of the learning rate's schedule.
        dtype: of the student's arithmetic; a float16 loss is scaled.
        device: where the parameters are.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        train: TrainSection,
        *,
        num_steps: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._parameters, self._train, self._num_steps = parameters, train, num_steps
        self._adamw = adamw(parameters.values(), train)
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.average = WeightAverage(parameters, train.ema_decay) if train.ema_decay else None

    @property
    def may_overflow(self) -> bool:
        """Whether gradients that are not finite only mean that the loss scale is too large."""
        return self._scaler.is_enabled() and self._scaler.get_scale() > 1

    def zero_grad(self) -> None:
        """Begin a step."""
        self._adamw.zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`."""
        self._scaler.scale(loss).backward()

    def clip(self) -> float:
        """Scale the gradients down to the recipe's norm; the norm that they had."""
        self._scaler.unscale_(self._adamw)
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._train.max_grad_norm)
        return whole(norm).item()

    def step(self, number: int) -> float:
        """Take step `number`, counted from 1, unless its gradients overflowed; the learning rate used."""
        rate = learning_rate(number, self._num_steps, self._train)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        scale = self._scaler.get_scale()
        self._scaler.step(self._adamw)
        self._scaler.update()
        # A step that was left out lowers the scale; it is none to the average either.
        if self.average is not None and self._scaler.get_scale() >= scale:
            self.average.update()
        return rate

    def state(self, *, step: int, tokens: int, supervised_tokens: int) -> TrainerState:
        """Everything as whole tensors, some of them the live ones; all processes meet here."""
        optimizer = {
            f"{name}/{key}": whole(value)
            for name, parameter in self._parameters.items()
            for key, value in self._adamw.state[parameter].items()
        }
        average = {} if self.average is None else self.average.weights
        scaler = self._scaler.state_dict()
        return TrainerState(
            step=step,
            tokens=tokens,
            supervised_tokens=supervised_tokens,
            student={name: whole(parameter) for name, parameter in self._parameters.items()},
            optimizer=optimizer,
            average={name: whole(tensor) for name, tensor in average.items()},
            loss_scale=LossScale(scaler["scale"], scaler["_growth_tracker"]) if scaler else None,
        )

    @torch.no_grad()
    def load(self, state: TrainerState) -> None:
        """Take over `state`.

        Raises:
            UsageError: it belongs to another student.
        """
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        if shapes != {name: tensor.shape for name, tensor in state.student.items()}:
            raise UsageError("the checkpoint is of a student of another shape", hint="start a new run")
        for name, parameter in self._parameters.items():
            parameter.copy_(sharded_like(state.student[name], parameter))
        self._adamw.state.clear()
        for full_name, tensor in state.optimizer.items():
            name, key = full_name.rsplit("/", 1)
            parameter = self._parameters[name]
            self._adamw.state[parameter][key] = sharded_like(tensor, parameter)
        if self.average is not None:
            for name, tensor in self.average.weights.items():
                tensor.copy_(sharded_like(state.average[name], tensor))
        if state.loss_scale is not None:
            changed = {"scale": state.loss_scale.scale, "_growth_tracker": state.loss_scale.good_steps}
            self._scaler.load_state_dict(self._scaler.state_dict() | changed)


def adamw(parameters: Iterable[nn.Parameter], train: TrainSection) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101), with weight decay on matrices but not on norms and biases."""
    parameters = list(parameters)
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    vectors = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=BETAS, eps=EPS, fused=True)


def learning_rate(step: int, num_steps: int, train: TrainSection) -> float:
    """The learning rate of `step`, counted from 1: a linear warm-up, then the recipe's shape.

    The first step after warm-up has the peak; cosine and linear would reach zero one step after the last.
    """
    warmup = math.ceil(train.warmup_ratio * num_steps)
    if step <= warmup:
        return train.learning_rate * step / warmup
    progress = (step - 1 - warmup) / (num_steps - warmup)
    shape = {"cosine": (1 + math.cos(math.pi * progress)) / 2, "linear": 1 - progress, "constant": 1.0}
    return train.learning_rate * shape[train.lr_scheduler]
