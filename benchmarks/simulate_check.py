"""Calibrate on this machine, then predict loads that were not in the calibration, and measure them.

python benchmarks/simulate_check.py MODEL [--rate 2] [--num-prompts 24] ...

Prints measured and predicted figures with their relative errors. Also prints how many requests a second the
simulator gets through.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FIGURES = (
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "mean_itl_ms",
    "p99_itl_ms",
    "mean_e2el_ms",
)


def tessera(*arguments: str) -> Any:
    command = [sys.executable, "-m", "tessera_cli", *arguments, "--json", "--quiet"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def compare(name: str, measured: dict[str, Any], predicted: dict[str, Any]) -> None:
    print(f"\n{name}\n{'':20}{'measured':>12}{'simulated':>12}{'error':>9}")
    for figure in FIGURES:
        real, simulated = measured[figure], predicted[figure]
        print(f"{figure:20}{real:12.1f}{simulated:12.1f}{simulated / real - 1:+9.1%}")


def check(arguments: argparse.Namespace, directory: Path) -> None:
    engine = ["--num-blocks", "600", "--max-model-len", "512"]
    lengths = ["--input-len", str(arguments.input_len), "--output-len", str(arguments.output_len)]
    bench = ["bench", arguments.model, *engine, "--num-warmups", "2"]
    file = directory / "bench.json"
    levels = ["--concurrency", arguments.calibrate, *lengths]
    file.write_text(json.dumps(tessera(*bench, *levels)), encoding="utf-8")
    simulate = ["simulate", "--calibration", str(file)]
    num_prompts = ["--num-prompts", str(arguments.num_prompts)]
    loads = {
        "closed loop, spread lengths": ["--concurrency", str(arguments.concurrency), "--range-ratio", "0.5"],
        "Poisson arrivals": ["--request-rate", str(arguments.rate), "--range-ratio", "0.5"],
    }
    for name, load in loads.items():
        options = [*load, *lengths, *num_prompts]
        predicted = tessera(*simulate, *options)
        if name == next(iter(loads)):
            print(predicted["machine"]["name"])
        compare(f"{name}: {' '.join(options)}", tessera(*bench, *options), predicted)


def speed(num_prompts: int) -> None:
    costs = ["--step-ms", "10", "--token-us", "20", "--num-blocks", "40000", "--max-model-len", "2048"]
    print(
        f"\n{'simulator, ' + format(num_prompts, ',') + ' requests of 128 in, 128 out':52}{'requests/s':>12}"
    )
    for name, load in {
        "concurrency 256, equal lengths": ["--concurrency", "256"],
        "concurrency 256, lengths x (1 +- 0.5)": ["--concurrency", "256", "--range-ratio", "0.5"],
        "20 requests/s": ["--request-rate", "20"],
    }.items():
        figures = tessera("simulate", *costs, *load, "--num-prompts", str(num_prompts))
        print(f"{name:52}{figures['simulated_requests_per_second']:12,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--calibrate", default="1,4,12", help="concurrencies that are measured first")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--speed", type=int, default=3000, help="requests of the speed test, 0 for none")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        check(arguments, Path(directory))
    if arguments.speed:
        speed(arguments.speed)


if __name__ == "__main__":
    main()
