"""Which held-out documents an evaluation measures on; no torch, for a plan asks as well."""

from collections.abc import Sequence

import numpy as np

from tessera_cli.distill.data.document import Document


def measured_documents(documents: Sequence[Document], *, max_targets: int) -> list[Document]:
    """Whole ones of `documents` of up to `max_targets` targets together, at least one.

    Their order is shuffled, always in the same way: a file sorted by topic is not cut to its first topic.
    """
    chosen: list[Document] = []
    num_targets = 0
    for index in np.random.default_rng(0).permutation(len(documents)).tolist():
        num_targets += documents[index].num_supervised_tokens
        if chosen and num_targets > max_targets:
            break
        chosen.append(documents[index])
    return chosen
