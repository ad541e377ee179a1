"""Many short requests of mixed kinds, a third of whose clients leave at a random moment.

python -m benchmarks.soak MODEL [--num-requests 10000] [--concurrency 64]

Ends with status 1 if a request is lost, a block is leaked, /health is not 200, or the server's memory grows
by more than 3 % after the first tenth.
"""

import argparse
import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import psutil

from benchmarks.served import NAME, metric, served, wait_until_idle

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


def kinds(generator: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    body: dict[str, Any] = {
        "model": NAME,
        "max_tokens": generator.randint(1, 24),
        "seed": generator.randrange(99),
    }
    body["stream"] = generator.random() < 0.5
    match generator.randrange(6):
        case 0:
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
            body |= {"response_format": form}
        case 1:
            return "/v1/completions", body | {
                "prompt": "fox " * generator.randint(1, 40),
                "n": 3,
                "logprobs": 2,
            }
        case 2:
            return "/v1/completions", body | {"prompt": ["a", "b c", "d e f"], "stop": ["e", " t"]}
        case 3:
            return "/v1/completions", body | {"prompt": "The quick", "echo": True, "logprobs": 1}
        case 4:
            return "/v1/completions", body | {"prompt": "x", "top_k": 9, "min_p": 0.1, "presence_penalty": 1}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": "How are you?"}]}


async def ask(http: httpx.AsyncClient, seed: int) -> str:
    """What became of a request: its status, or that its client left."""
    generator = random.Random(seed)
    path, body = kinds(generator)
    patience = generator.uniform(0.0, 0.3) if generator.random() < 1 / 3 else None
    try:
        async with asyncio.timeout(patience):
            answer = await http.post(path, json=body)
    except TimeoutError:
        return "left"
    if answer.status_code == 200 and body["stream"] and not answer.text.endswith("data: [DONE]\n\n"):
        return "cut"
    return str(answer.status_code)


async def soak(url: str, pid: int, num_requests: int, concurrency: int) -> tuple[Counter[str], list[int]]:
    """The fates of all requests, and the server's memory in bytes after each tenth of them."""
    fates: Counter[str] = Counter()
    memory = []
    numbers = iter(range(num_requests))

    async def client(http: httpx.AsyncClient) -> None:
        for number in numbers:
            fates[await ask(http, number)] += 1
            if number % (num_requests // 10) == 0:
                memory.append(psutil.Process(pid).memory_info().rss)
                health = await http.get("/health")
                fates[f"health {health.status_code}"] += 1

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        await asyncio.gather(*(client(http) for _ in range(concurrency)))
    return fates, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--num-requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    args = parser.parse_args()
    with served(args.model, "--num-blocks", "600", "--max-model-len", "256") as (url, pid):
        fates, memory = asyncio.run(soak(url, pid, args.num_requests, args.concurrency))
        with httpx.Client(base_url=url) as http:
            wait_until_idle(http)
            preemptions = metric(http, "num_preemptions_total")
    growth = memory[-1] / memory[1] - 1
    print(f"{dict(fates)}, {preemptions:.0f} preemptions, memory {growth:+.1%} after the first tenth")
    good = set(fates) <= {"200", "left", "health 200"} and growth <= 0.03
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
