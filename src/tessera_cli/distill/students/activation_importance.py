"""How active the teacher's channels, neurons and heads are on documents of the run."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera_cli.distill.data.corpus import TrainBatch
from tessera_cli.distill.students.student import forward_batch
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.operators import TorchOperators

Record = Callable[[str, Tensor], None]


@dataclass(frozen=True, eq=False)
class ActivationImportance:
    """Scores in float64 on the CPU; more is more important.

    Attributes:
        hidden: [hidden], of the hidden state's channels, summed over what reads it: each layer's `qkv_proj`
            and `gate_up_proj`, and the head.
        neurons: [layers, intermediate], of what enters `down_proj`.
        heads: [layers, query heads], of what enters `o_proj`.
    """

    hidden: Tensor
    neurons: Tensor
    heads: Tensor


@torch.inference_mode()
def activation_importance(teacher: Decoder, batches: Iterable[TrainBatch]) -> ActivationImportance:
    """Minitron's importance (arXiv 2407.14679): the mean of |activation| over a document, L2 over documents.

    A head's activation is the L2 norm of its output.
    """
    squares: dict[str, Tensor] = {}
    for batch in batches:
        lengths = torch.tensor(batch.cu_seqlens).diff()
        documents = torch.arange(len(lengths)).repeat_interleave(lengths)

        def record(
            name: str, values: Tensor, documents: Tensor = documents, lengths: Tensor = lengths
        ) -> None:
            sums = values.new_zeros(len(lengths), values.shape[1]).double()
            sums.index_add_(0, documents.to(values.device), values.double())
            square = (sums.cpu() / lengths[:, None]).square().sum(0)
            squares[name] = squares[name] + square if name in squares else square

        with _recording(teacher, record):
            forward_batch(teacher, batch, TorchOperators())  # whose norms are called, and so watched

    def scores(module: str) -> Tensor:
        return torch.stack(
            [squares[f"layers.{layer}.{module}"].sqrt() for layer in range(len(teacher.layers))]
        )

    return ActivationImportance(
        hidden=scores("qkv_proj").sum(0) + scores("gate_up_proj").sum(0) + squares["norm"].sqrt(),
        neurons=scores("down_proj"),
        heads=scores("o_proj"),
    )


@contextmanager
def _recording(teacher: Decoder, record: Record) -> Iterator[None]:
    """Call `record(module name, magnitudes [num_tokens, n])` for each part of the teacher that is judged."""
    with ExitStack() as hooks:
        for name, module in teacher.named_modules():
            part = name.rpartition(".")[2]
            if part in ("qkv_proj", "gate_up_proj", "down_proj"):
                hook = _on_input(name, record, 1)
            elif part == "o_proj":
                hook = _on_input(name, record, teacher.config.head_dim)
            else:
                continue
            hooks.callback(module.register_forward_pre_hook(hook).remove)
        hooks.callback(teacher.norm.register_forward_hook(_on_output("norm", record)).remove)
        yield


def _on_input(name: str, record: Record, group: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        record(name, arguments[0].float().unflatten(1, (-1, group)).norm(dim=-1))

    return hook


def _on_output(name: str, record: Record) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def hook(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        record(name, output.float().abs())

    return hook
