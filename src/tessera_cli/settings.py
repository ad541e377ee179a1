"""Every environment variable that Tessera reads, parsed strictly in one place."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from tessera_cli.errors import UsageError

LogLevel = Literal["debug", "info", "warning", "error"]


@dataclass(frozen=True)
class Settings:
    """The process's environment.

    `home` is where converted models are cached; `no_progress` replaces the live display by plain lines;
    `api_keys` are those that a server accepts, with commas between them in TESSERA_API_KEY; `rank` is this
    process's number among those that a launcher started, 0 for the main one; `is_left_alone` says that
    accelerate was asked for several and has started only this one, as it does without GPUs.
    """

    home: Path
    model: str | None
    log_level: LogLevel
    debug: bool
    no_progress: bool
    offline: bool
    api_keys: tuple[str, ...] = ()
    rank: int = 0
    is_left_alone: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Settings":
        """Read `env` (the process's environment by default).

        Raises:
            UsageError: a variable has a value that means nothing.
        """
        env = os.environ if env is None else env
        return cls(
            home=_home(env),
            model=env.get("TESSERA_MODEL") or None,
            log_level=_log_level(env),
            debug=_flag(env, "TESSERA_DEBUG"),
            no_progress=_flag(env, "TESSERA_NO_PROGRESS"),
            offline=_flag(env, "HF_HUB_OFFLINE"),
            api_keys=tuple(key.strip() for key in env.get("TESSERA_API_KEY", "").split(",") if key.strip()),
            rank=_rank(env),
            is_left_alone=_is_left_alone(env),
        )


def is_main_process(env: Mapping[str, str] | None = None) -> bool:
    """Whether this is the one that tells, of the processes that a launcher started."""
    try:
        return _rank(os.environ if env is None else env) == 0
    except UsageError:
        return True


# GNU OpenMP's threads wait for each other ten times as long by default before they sleep. Where cores are
# busy that is most of a step, spent on the cores that the awaited thread needs; where they are free few waits
# are longer.
_SPINS = "30000"


def prepare_process(*, offline: bool) -> None:
    """Set what libraries read from the environment at their import; call before importing them."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _home(env: Mapping[str, str]) -> Path:
    cache = Path(env.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(env.get("TESSERA_HOME") or cache / "tessera")
    try:
        return home.expanduser()
    except RuntimeError:
        raise UsageError(f"{home}: no such home directory", hint="set TESSERA_HOME to a directory") from None


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise UsageError(f"{name}={env[name]!r} is not a flag", hint=f"set {name} to 1 or 0")


def _rank(env: Mapping[str, str]) -> int:
    # Launchers set both; alone the name is anybody's.
    value = env.get("RANK", "0") if "WORLD_SIZE" in env else "0"
    if not value.isdecimal():
        raise UsageError(f"RANK={value!r} is not a process's number", hint="unset RANK, or use a launcher")
    return int(value)


def _is_left_alone(env: Mapping[str, str]) -> bool:
    # Its simple launcher gives an address to meet at when it is asked for several processes, but no number.
    is_launched = "ACCELERATE_MIXED_PRECISION" in env
    return is_launched and "MASTER_ADDR" in env and not any(name in env for name in _PROCESS_COUNTS)


def _log_level(env: Mapping[str, str]) -> LogLevel:
    value = (env.get("TESSERA_LOG_LEVEL") or "warning").lower()
    if value not in get_args(LogLevel):
        raise UsageError(
            f"TESSERA_LOG_LEVEL={value!r} is not a log level", hint="use " + ", ".join(get_args(LogLevel))
        )
    return cast(LogLevel, value)


def relevant_variables(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that change what Tessera does, for a report; secrets are masked."""
    env = os.environ if env is None else env
    return {
        name: "***" if name.endswith(_SECRETS) else value
        for name, value in sorted(env.items())
        if name.startswith(_PREFIXES) or name in _OTHERS
    }


# Where launchers, MPI's among them, tell how many processes there are, by accelerate's own list.
_PROCESS_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

_PREFIXES = ("TESSERA_", "HF_", "CUDA_", "TORCH_", "OMP_", "GOMP_", "MKL_")
_OTHERS = ("TOKENIZERS_PARALLELISM", "XDG_CACHE_HOME", "NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "CI")
_SECRETS = ("_TOKEN", "_KEY", "_SECRET", "_PASSWORD")
