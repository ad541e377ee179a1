"""A loss between hidden states: the student's layers are to say what layers of the teacher say."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from tessera_cli.distill.students.layer_choice import hidden_pairs
from tessera_cli.errors import UsageError
from tessera_cli.models.decoder import Decoder
from tessera_cli.recipe.hidden_section import HiddenLossSection


class HiddenStateLoss(nn.Module):
    """The mean over pairs of layers of mse or 1 - cosine between their outputs, as FitNets (arXiv 1412.6550).

    Where the widths differ each pair has a learned matrix W from the student's hidden state to the teacher's;
    it belongs to training, not to the student. Its first values are always the same.

    Args:
        section: kind and weight; not `kind: none`.
        pairs: (student layer, teacher layer).
        student_hidden: width of the student's hidden state.
        teacher_hidden: width of the teacher's.
    """

    def __init__(
        self,
        section: HiddenLossSection,
        pairs: Sequence[tuple[int, int]],
        *,
        student_hidden: int,
        teacher_hidden: int,
    ) -> None:
        super().__init__()
        if section.weight is None:
            raise ValueError("a checked section has a weight")
        self.weight = section.weight
        self.student_layers = tuple(student for student, _ in pairs)
        self.teacher_layers = tuple(teacher for _, teacher in pairs)
        self._distance = {"mse": _mse, "cosine": _cosine}[section.kind]
        self.projections = nn.ParameterList()
        if student_hidden != teacher_hidden:
            generator = torch.Generator().manual_seed(0)
            for _ in pairs:
                # Outputs as large as inputs.
                matrix = torch.randn(teacher_hidden, student_hidden, generator=generator)
                self.projections.append(nn.Parameter(matrix / student_hidden**0.5))

    def forward(self, student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
        """Float32 sum over tokens of the mean over pairs; [m, hidden] a pair, the teacher's constant."""
        total = torch.zeros((), device=student[0].device)
        with torch.autocast(total.device.type, enabled=False):
            for pair, (ours, theirs) in enumerate(zip(student, teacher, strict=True)):
                projected = ours.float() @ self.projections[pair].t() if self.projections else ours.float()
                # Cloned: what was made in inference mode may not be kept for the backward pass.
                total = total + self._distance(projected, theirs.clone().float()).sum()
        return total / len(student)


def hidden_loss(
    section: HiddenLossSection, student: Decoder, teacher: Decoder | None
) -> HiddenStateLoss | None:
    """The loss that `section` asks for, None for none; `teacher` is None where only a cache of it is at hand.

    Raises:
        UsageError: there is no teacher to watch, or no such layer.
    """
    if section.kind == "none":
        return None
    if teacher is None:
        raise UsageError(
            "a teacher cache has no hidden states of layers for `loss.hidden`",
            hint="set `loss.hidden.kind: none`, or `teacher.cache.kind: none`",
        )
    ours, theirs = student.config, teacher.config
    pairs = hidden_pairs(section.pairs or "even", ours.num_hidden_layers, theirs.num_hidden_layers)
    return HiddenStateLoss(section, pairs, student_hidden=ours.hidden_size, teacher_hidden=theirs.hidden_size)


@contextmanager
def layer_outputs(decoder: Decoder, layers: Sequence[int], index: Tensor) -> Iterator[list[Tensor]]:
    """A list that one forward pass of `decoder` in this context fills.

    It gets the outputs `[m, hidden]` of `layers`, in their order, at the tokens `index` `[m]`.
    """
    found: dict[int, Tensor] = {}
    outputs: list[Tensor] = []
    with ExitStack() as hooks:
        for layer in set(layers):
            hooks.callback(decoder.layers[layer].register_forward_hook(_keep(found, layer, index)).remove)
        yield outputs
    outputs.extend(found[layer] for layer in layers)


def _keep(found: dict[int, Tensor], layer: int, index: Tensor) -> Callable[..., None]:
    def hook(_: nn.Module, __: tuple[object, ...], output: Tensor) -> None:
        found[layer] = output.index_select(0, index)

    return hook


def _mse(student: Tensor, teacher: Tensor) -> Tensor:
    return (student - teacher).square().mean(-1)


def _cosine(student: Tensor, teacher: Tensor) -> Tensor:
    return 1 - cosine_similarity(student, teacher, dim=-1)
