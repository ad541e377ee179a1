"""What the environment says of the process."""

import os

import pytest

from tessera_cli.settings import Settings, is_main_process, prepare_process

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "True"}
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("env", "is_left_alone"),
    [
        ({}, False),
        (ADDRESS, False),
        (LAUNCHED, False),
        (LAUNCHED | ADDRESS, True),
        (LAUNCHED | ADDRESS | {"WORLD_SIZE": "2", "RANK": "1"}, False),
        (LAUNCHED | ADDRESS | {"PMI_SIZE": "2"}, False),
    ],
    ids=lambda value: "-".join(sorted(value)) if isinstance(value, dict) else "",
)
def test_a_process_knows_when_a_launcher_left_it_alone(env: dict[str, str], is_left_alone: bool) -> None:
    assert Settings.from_env(env).is_left_alone == is_left_alone


@pytest.mark.parametrize(
    ("env", "is_main"),
    [
        ({}, True),
        ({"RANK": "1"}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "one", "WORLD_SIZE": "2"}, True),
    ],
    ids=str,
)
def test_one_process_of_a_launcher_tells(env: dict[str, str], is_main: bool) -> None:
    assert is_main_process(env) == is_main


@pytest.mark.parametrize(
    ("env", "spins"),
    [({}, "30000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, None)],
    ids=["bounded", "given", "by policy"],
)
def test_threads_wait_as_the_environment_says_and_else_not_for_long(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], spins: str | None
) -> None:
    monkeypatch.setattr(os, "environ", env)
    prepare_process(offline=False)
    assert env.get("GOMP_SPINCOUNT") == spins
