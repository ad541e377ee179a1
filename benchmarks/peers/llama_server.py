"""llama.cpp's server as a peer: `python -m benchmarks.peers.llama_server SERVER GGUF THREADS`."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from typing import Any

import httpx

from benchmarks.peers.driver import answer, keep_stdout, summary

NUM_SLOTS, TOKENS_PER_SLOT = 64, 640


async def stream(http: httpx.AsyncClient, prompt: list[int], output_len: int, got: Any) -> None:
    """One request; `got` is told of each event's tokens."""
    body = {
        "prompt": prompt,
        "n_predict": output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": True,
    }
    async with http.stream("POST", "/completion", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if not event.get("stop"):
                    got(event["tokens"])


async def load(url: str, requests: list[tuple[list[int], int]], concurrency: int) -> dict[str, Any]:
    added: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    places = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(
        base_url=url,
        timeout=None,
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=0),
    ) as http:

        async def one(key: str, prompt: list[int], output_len: int) -> None:
            def got(new: list[int]) -> None:
                last[key] = time.perf_counter()
                first.setdefault(key, last[key])
                tokens[key] += new

            async with places:
                added[key], tokens[key] = time.perf_counter(), []
                await stream(http, prompt, output_len, got)

        start = time.perf_counter()
        await asyncio.gather(*(one(str(index), *request) for index, request in enumerate(requests)))
        return summary(time.perf_counter() - start, added, first, last, tokens)


def main() -> None:
    server, gguf, threads = sys.argv[1:]
    out = keep_stdout()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [server, "-m", gguf, "--port", str(port), "-t", threads, "-tb", threads, "-np", str(NUM_SLOTS)]
    command += [
        "-c",
        str(NUM_SLOTS * TOKENS_PER_SLOT),
        "--no-kv-unified",
        "-cb",
        "--no-webui",
        "--log-disable",
    ]
    version = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stderr
    process = subprocess.Popen(command, stdout=sys.stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                if httpx.get(f"{url}/health").is_success:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None:
                raise SystemExit(f"{server} ended with {process.returncode}")
            time.sleep(0.1)
        line = next(line for line in version.splitlines() if line.startswith("version"))
        answer(
            out,
            line,
            lambda requests, concurrency: asyncio.run(load(url, requests, concurrency)),
            [process.pid],
        )
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    main()
