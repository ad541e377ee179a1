"""Tessera beside other engines: the same requests, greedy and in full, by turns in each round.

python -m benchmarks.peers MODEL [--repeat 3] [--workload mixed --workload prefix ...] [--json FILE]
    [--transformers] [--llama-server BIN --gguf F32.gguf --gguf Q8_0.gguf ...]
    [--openvino PYTHON --openvino-model F32_DIR=f32 --openvino-model INT8_DIR=f32] [--vllm PYTHON]

MODEL is a directory in float32. Every engine has a process of its own for all its rounds, and does nothing
while another one runs. llama.cpp is driven over loopback, all others in their own process; its client's time
counts against it. A peer's PYTHON is that of a virtual environment where it is installed.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import workload
from tessera_cli.models.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
WORKLOADS = ("mixed", "single", "prefix", "prefix-warm")


class Peer:
    """An engine in a process that answers workloads."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.version = self._read()["version"]

    def run(self, name: str, text: list[int], repeat: int) -> dict[str, Any]:
        """Run a workload, to its end."""
        assert self._process.stdin is not None
        print(json.dumps(vars(workload(name, text, repeat=repeat))), file=self._process.stdin, flush=True)
        return self._read()

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with status {self._process.wait()}")
        return dict(json.loads(line))


def peers(options: argparse.Namespace) -> list[Peer]:
    """Start what was asked for."""
    python, threads = sys.executable, str(options.threads)

    variables = [f"{library}_NUM_THREADS={threads}" for library in ("OMP", "MKL", "OPENBLAS")]
    variables += [f"PYTHONPATH={ROOT}", "HF_HUB_OFFLINE=1"]
    variables += ["VLLM_CPU_KVCACHE_SPACE=2", "VLLM_ENABLE_V1_MULTIPROCESSING=0"]

    def adapter(interpreter: str, module: str, *arguments: str) -> list[str]:
        return ["env", *variables, interpreter, "-m", f"benchmarks.peers.{module}", *arguments]

    commands = {f"tessera {name}": adapter(python, "tessera", options.model, how) for name, how in _OURS}
    if options.transformers:
        commands["transformers f32"] = adapter(python, "transformers", options.model)
    for gguf in options.gguf:
        commands[f"llama.cpp {Path(gguf).stem}"] = adapter(
            python, "llama_server", options.llama_server, gguf, threads
        )
    for text in options.openvino_model:
        folder, _, precision = text.partition("=")
        commands[f"openvino {Path(folder).name}"] = adapter(
            options.openvino, "openvino", folder, precision, threads
        )
    if options.vllm:
        commands["vllm f32"] = adapter(options.vllm, "vllm", options.model, "float32")
    return [Peer(name, command) for name, command in commands.items()]


_OURS = (("f32", "none"), ("int8", "int8"))


def text_ids(model: Path) -> list[int]:
    """The recipe's training text as token ids."""
    tokenizer = Tokenizer.from_dir(model)
    lines = (ROOT / "recipes" / "data" / "train.jsonl").read_text().splitlines()
    messages = [message["content"] for line in lines for message in json.loads(line)["messages"]]
    return tokenizer.encode("\n".join(messages))


def rows(results: dict[str, dict[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """A row for each engine and workload: medians over the rounds, and ratios to Tessera in float32."""
    table = []
    for name, by_peer in results.items():
        speeds = {peer: [_speed(run) for run in runs] for peer, runs in by_peer.items()}
        ours = by_peer["tessera f32"]
        for peer, runs in by_peer.items():
            same = [
                ours_one == theirs
                for run, our_run in zip(runs, ours, strict=True)
                for theirs, ours_one in zip(run["tokens"], our_run["tokens"], strict=True)
            ]
            ratios = [mine / speed for mine, speed in zip(speeds["tessera f32"], speeds[peer], strict=True)]
            table.append(
                {
                    "workload": name,
                    "engine": peer,
                    "output_throughput": statistics.median(speeds[peer]),
                    "lowest": min(speeds[peer]),
                    "highest": max(speeds[peer]),
                    "tessera_f32_over_it": statistics.median(ratios),
                    "mean_ttft_ms": 1e3 * statistics.median(statistics.fmean(run["ttft"]) for run in runs),
                    "mean_tpot_ms": 1e3 * statistics.median(statistics.fmean(run["tpot"]) for run in runs),
                    "peak_rss_mb": max(run["peak_rss"] for run in runs) / 1e6,
                    "same_answers": statistics.fmean(same),
                }
            )
    return table


def _speed(run: dict[str, Any]) -> float:
    """Output tokens per second."""
    return float(sum(map(len, run["tokens"])) / run["seconds"])


def tell(table: list[dict[str, Any]]) -> None:
    """The table as Markdown."""
    print("| workload | engine | output tok/s | f32 ÷ it | TTFT ms | TPOT ms | peak RSS MB | same answers |")
    print("|---|---|---|---|---|---|---|---|")
    for row in table:
        print(
            f"| {row['workload']} | {row['engine']} "
            f"| **{row['output_throughput']:.1f}** ({row['lowest']:.1f}–{row['highest']:.1f}) "
            f"| {row['tessera_f32_over_it']:.2f} | {row['mean_ttft_ms']:,.0f} | {row['mean_tpot_ms']:.1f} "
            f"| {row['peak_rss_mb']:,.0f} | {row['same_answers']:.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=lambda text: str(Path(text).resolve()))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workload", action="append", choices=WORKLOADS)
    parser.add_argument("--transformers", action="store_true", help="static batches, in this environment")
    parser.add_argument("--llama-server")
    parser.add_argument("--gguf", action="append", default=[])
    parser.add_argument("--openvino", help="a Python that has openvino-genai")
    parser.add_argument("--openvino-model", action="append", default=[], metavar="DIR=PRECISION")
    parser.add_argument("--vllm", help="a Python that has vllm-cpu")
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args()
    text = text_ids(Path(options.model))
    running = peers(options)
    print(", ".join(f"{peer.name}: {peer.version}" for peer in running), file=sys.stderr)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    try:
        for peer in running:
            peer.run("single", text[::-1], 0)  # warm, on prompts that do not come again
        for repeat in range(options.repeat):
            for name in options.workload or WORKLOADS:
                for peer in running:
                    run = peer.run(name, text, repeat)
                    results.setdefault(name, {}).setdefault(peer.name, []).append(run)
                    print(f"{repeat} {name:12} {peer.name:20} {_speed(run):7.1f} tok/s", file=sys.stderr)
    finally:
        for peer in running:
            peer.stop()
    table = rows(results)
    if options.json is not None:
        versions = {peer.name: peer.version for peer in running}
        options.json.write_text(json.dumps({"versions": versions, "rows": table}, indent=2) + "\n")
    tell(table)


if __name__ == "__main__":
    main()
