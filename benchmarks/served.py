"""A `tessera serve` of one's own, for the benchmarks of the server."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

NAME = "benchmark"


@contextmanager
def served(model: str, *options: str) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a server that is ready."""
    command = [sys.executable, "-m", "tessera_cli", "serve", model, "--port", "0", "--no-access-log"]
    command += ["--served-model-name", NAME, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url, said = "", ""
        for line in process.stderr:
            said += line
            found = re.match(r"(listening|ready) +(http://[^/,]+)", line)
            if found is not None:
                url = found[2]
            if line.startswith("ready"):
                break
        else:
            raise SystemExit(f"the server has not started:\n{said}")
        yield url, process.pid
        process.terminate()
        if process.wait(60) != 0:
            raise SystemExit(f"the server ended with {process.returncode}")
    finally:
        process.kill()
        process.stderr.close()


def metric(http: httpx.Client, name: str) -> float:
    """One of the server's metrics, without labels."""
    rows = http.get("/metrics").text.splitlines()
    return next(float(row.split()[1]) for row in rows if row.startswith(f"tessera:{name} "))


def wait_until_idle(http: httpx.Client, seconds: float = 60.0) -> None:
    """Wait until no KV block is held.

    Raises:
        SystemExit: one still is.
    """
    deadline = time.monotonic() + seconds
    while metric(http, "kv_blocks_free") != metric(http, "kv_blocks_total"):
        if time.monotonic() > deadline:
            raise SystemExit(f"blocks are held {seconds:g} s after the last request")
        time.sleep(0.05)
