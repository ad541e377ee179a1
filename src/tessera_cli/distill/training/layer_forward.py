"""How the layers of a student run in training: compiled, or computed twice to keep less."""

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.train_section import TrainSection


def prepare_layers(student: Decoder, train: TrainSection) -> None:
    """Change how `student` computes as the recipe says, in place; what it computes stays.

    Compiled layers round in an order of their own, the same in every process. Attention is not compiled: its
    shapes are those of the documents, which no two batches share.
    """
    for layer in student.layers:
        if train.compile:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        if train.gradient_checkpointing:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
