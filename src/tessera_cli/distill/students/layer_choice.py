"""Which of the teacher's layers a student starts with."""

from collections.abc import Sequence
from typing import Literal

from tessera_cli.errors import UsageError


def even_layers(num_teacher_layers: int, num_layers: int) -> list[int]:
    """`num_layers` layers, the first and the last among them, evenly spread.

    Raises:
        UsageError: the teacher has fewer layers.
    """
    check_depth(num_teacher_layers, num_layers)
    if num_layers == 1:
        return [0]
    gaps = num_layers - 1
    return [(2 * i * (num_teacher_layers - 1) + gaps) // (2 * gaps) for i in range(num_layers)]


def important_layers(importance: Sequence[float], num_layers: int) -> list[int]:
    """The `num_layers` layers of the highest `importance`, in the model's order; of equals the earlier ones.

    Raises:
        UsageError: the teacher has fewer layers.
    """
    check_depth(len(importance), num_layers)
    ranked = sorted(range(len(importance)), key=lambda layer: (-importance[layer], layer))
    return sorted(ranked[:num_layers])


def listed_layers(num_teacher_layers: int, layers: Sequence[int]) -> list[int]:
    """`layers` as they are.

    Raises:
        UsageError: one of them is not in the teacher.
    """
    if layers[-1] >= num_teacher_layers:
        raise UsageError(
            f"student.layers names layer {layers[-1]}, but the teacher has {num_teacher_layers}",
            hint=f"layers are counted from 0: the last is {num_teacher_layers - 1}",
        )
    return list(layers)


def hidden_pairs(
    pairs: Sequence[Sequence[int]] | Literal["even"], num_student_layers: int, num_teacher_layers: int
) -> list[tuple[int, int]]:
    """(student layer, teacher layer) whose outputs are compared: `pairs` as they are, or evenly spread.

    Even: each of the student's layers with the teacher's at the same share of the depth, the last with the
    last, as in TinyBERT (arXiv 1909.10351).

    Raises:
        UsageError: one of the two models has no such layer.
    """
    if pairs == "even":
        ends = [(layer + 1) * num_teacher_layers for layer in range(num_student_layers)]
        return [(layer, -(-end // num_student_layers) - 1) for layer, end in enumerate(ends)]
    for student, teacher in pairs:
        for who, layer, depth in (
            ("student", student, num_student_layers),
            ("teacher", teacher, num_teacher_layers),
        ):
            if layer >= depth:
                raise UsageError(
                    f"loss.hidden.pairs names layer {layer} of the {who}, which has {depth}",
                    hint=f"layers are counted from 0: the last is {depth - 1}",
                )
    return [(student, teacher) for student, teacher in pairs]


def check_depth(num_teacher_layers: int, num_layers: int) -> None:
    """Raise UsageError unless a student of `num_layers` can be cut from the teacher."""
    if num_layers > num_teacher_layers:
        raise UsageError(
            f"student.num_hidden_layers is {num_layers}, but the teacher has {num_teacher_layers} layers",
            hint=f"choose at most {num_teacher_layers}",
        )
