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
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Figures, machine, rows, speed
from benchmarks.peers.page import tables
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
                    print(f"{repeat} {name:12} {peer.name:20} {speed(run):7.1f} tok/s", file=sys.stderr)
    finally:
        for peer in running:
            peer.stop()
    found = Figures(machine(), {peer.name: peer.version for peer in running}, options.repeat, rows(results))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(found), indent=2) + "\n")
    print(tables([found]))


if __name__ == "__main__":
    main()
