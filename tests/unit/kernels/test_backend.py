"""The choice of an attention backend."""

import pytest

from tessera_cli.errors import UsageError
from tessera_cli.kernels.backend import select_backend


@pytest.mark.parametrize("name", ["auto", "reference"])
def test_names_the_backend_and_the_reason(name: str) -> None:
    chosen, reason = select_backend(name, "cpu")
    assert chosen == "reference"
    assert reason


def test_refuses_an_unknown_backend() -> None:
    with pytest.raises(UsageError, match="flash"):
        select_backend("flash", "cpu")
