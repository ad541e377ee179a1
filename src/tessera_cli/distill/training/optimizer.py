"""How the student's weights move: AdamW and its learning rate."""

import math

import torch
from torch import nn

from tessera_cli.recipe.train_section import TrainSection

BETAS = (0.9, 0.95)
EPS = 1e-8


def adamw(student: nn.Module, train: TrainSection) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101), with weight decay on matrices but not on norms and biases."""
    matrices = [parameter for parameter in student.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in student.parameters() if parameter.ndim < 2]
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
