"""Which layers a student keeps."""

from itertools import pairwise

import pytest

from tessera_cli.distill.students.layer_choice import even_layers, important_layers, listed_layers
from tessera_cli.errors import UsageError


@pytest.mark.parametrize("num_teacher_layers", [1, 2, 3, 12, 30])
def test_even_layers_keep_first_and_last_and_spread_evenly(num_teacher_layers):
    for num_layers in range(2, num_teacher_layers + 1):
        layers = even_layers(num_teacher_layers, num_layers)
        gaps = {after - before for before, after in pairwise(layers)}
        assert (layers[0], layers[-1], len(layers)) == (0, num_teacher_layers - 1, num_layers)
        assert min(gaps) >= 1
        assert max(gaps) - min(gaps) <= 1
    assert even_layers(num_teacher_layers, num_teacher_layers) == list(range(num_teacher_layers))
    assert even_layers(num_teacher_layers, 1) == [0]


def test_the_least_important_layers_are_dropped_and_the_order_kept():
    assert important_layers([0.9, 0.1, 0.5, 0.1, 0.7], 3) == [0, 2, 4]
    assert important_layers([0.9, 0.1, 0.5, 0.1, 0.7], 4) == [0, 1, 2, 4]


def test_more_layers_than_the_teacher_has_are_refused():
    for choose in (lambda: even_layers(3, 4), lambda: important_layers([1, 2, 3], 4)):
        with pytest.raises(UsageError, match="is 4, but the teacher has 3"):
            choose()
    with pytest.raises(UsageError, match="names layer 3, but the teacher has 3"):
        listed_layers(3, [0, 3])
