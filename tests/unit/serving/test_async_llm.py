"""The engine behind asyncio: the same tokens, nothing held by who has left, nobody else disturbed."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tessera_cli.engine.engine import Engine
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.errors import CapacityError, UsageError
from tessera_cli.serving.async_llm import AsyncLLM, DrainingError, QueueFullError, Status
from tessera_cli.serving.engine_events import EngineError
from tessera_cli.serving.generation import Generation, RequestTimeoutError
from tessera_cli.serving.llm import LLM
from tessera_cli.serving.outputs import CompletionOutput
from tessera_cli.serving.token_bytes import TokenBytes

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


@pytest.fixture(scope="module")
def llm(tiny_model_dir: Path) -> LLM:
    return LLM(tiny_model_dir, device="cpu", num_blocks=60, block_size=4, max_model_len=128)


@pytest.fixture(scope="module")
def token_bytes(tiny_model_dir: Path) -> TokenBytes:
    return TokenBytes.from_dir(tiny_model_dir)


@pytest.fixture
def run(llm: LLM, token_bytes: TokenBytes) -> Callable[..., None]:
    """Runs a test within a loop that has an `AsyncLLM`, and checks afterwards that nothing is left."""

    def run(test: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            async_llm = AsyncLLM(llm.engine, llm.tokenizer, token_bytes, **options)
            try:
                await asyncio.wait_for(test(async_llm), 30)
                assert not async_llm._generations
                assert async_llm.num_waiting == 0
            finally:
                assert await async_llm.stop()
            assert not async_llm._thread._live

        asyncio.run(main())
        assert not llm.engine.has_unfinished()
        assert llm.engine.stats().num_used_blocks == 0

    return run


def params(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | fields)


async def outputs_of(generation: Generation) -> dict[tuple[int, int], CompletionOutput]:
    outputs: dict[tuple[int, int], CompletionOutput] = {}
    texts: dict[tuple[int, int], str] = {}
    async for chunks in generation:
        assert chunks
        for chunk in chunks:
            key = (generation.place(chunk), chunk.index)
            assert key not in outputs, "a chunk after the end"
            texts[key] = texts.get(key, "") + chunk.text
            if chunk.output is not None:
                outputs[key] = chunk.output
                assert chunk.output.text == texts[key]
    return outputs


def test_the_outputs_are_those_of_the_plain_llm(llm: LLM, run: Callable[..., None]) -> None:
    sampling = params(20, temperature=1.5, seed=3, n=2, logprobs=1, stop=("t",))
    expected = {
        (place, output.index): output
        for place, request in enumerate(llm.generate(PROMPTS, sampling))
        for output in request.outputs
    }

    async def test(async_llm: AsyncLLM) -> None:
        assert await outputs_of(await async_llm.generate(PROMPTS, sampling)) == expected

    run(test)


def test_a_refusal_reaches_who_asked_and_leaves_no_sibling(run: Callable[..., None]) -> None:
    async def test(async_llm: AsyncLLM) -> None:
        with pytest.raises(CapacityError, match="128"):
            await async_llm.generate([[5], [5] * 128], params(4))
        with pytest.raises(UsageError, match="n="):
            await async_llm.generate([[5]], params(4, n=2**60))
        assert len(await outputs_of(await async_llm.generate([[5]], params(4)))) == 1

    run(test)


def test_closing_gives_the_blocks_back_before_the_next_step(run: Callable[..., None]) -> None:
    async def test(async_llm: AsyncLLM) -> None:
        generation = await async_llm.generate(PROMPTS, params(100))
        await anext(generation)
        generation.close()
        generation.close()
        assert await async_llm.call(lambda engine: engine.stats().num_used_blocks) == 0
        assert [chunk for chunks in [c async for c in generation] for chunk in chunks if chunk.output] == []

    run(test)


def test_who_is_cancelled_while_asking_leaves_nothing(
    llm: LLM, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step
    monkeypatch.setattr(llm.engine, "step", lambda: (time.sleep(0.05), step(llm.engine))[1])

    async def test(async_llm: AsyncLLM) -> None:
        busy = await async_llm.generate([[5]], params(10))
        for delay in (0.0, 0.02, 0.06):
            asking = asyncio.create_task(async_llm.generate(PROMPTS, params(100)))
            await asyncio.sleep(delay)
            asking.cancel()
            (result,) = await asyncio.gather(asking, return_exceptions=True)
            if isinstance(result, Generation):  # it was quicker
                result.close()
        assert len(await outputs_of(busy)) == 1

    run(test)


def test_a_full_queue_refuses_and_is_open_again_once_it_moves(run: Callable[..., None]) -> None:
    async def test(async_llm: AsyncLLM) -> None:
        with pytest.raises(QueueFullError):
            await async_llm.generate([[5]] * 3, params(4))
        for _ in range(4):
            assert len(await outputs_of(await async_llm.generate([[5]] * 2, params(4)))) == 2
        assert async_llm.num_rejected == 1

    run(test, max_queue=2)


def test_time_runs_out_for_one_alone(run: Callable[..., None]) -> None:
    async def test(async_llm: AsyncLLM) -> None:
        other = await async_llm.generate([[7]], params(100))
        late = await async_llm.generate([[5]], params(100), timeout=0.001)
        with pytest.raises(RequestTimeoutError):
            await outputs_of(late)
        assert len(await outputs_of(other)) == 1

    run(test)


def test_a_failed_step_fails_those_that_it_ran_and_no_others(
    llm: LLM, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner_run = llm.engine._runner.run
    faults = iter([RuntimeError("a fault\nof two lines")])

    def break_down(output: Any, *others: Any) -> Any:
        time.sleep(0.01)
        if len(output.scheduled) > 1:
            for fault in faults:
                raise fault
        return runner_run(output, *others)

    monkeypatch.setattr(llm.engine._runner, "run", break_down)

    async def test(async_llm: AsyncLLM) -> None:
        first = await async_llm.generate([[5]], params(50))
        second = await async_llm.generate([[6]], params(50))
        for generation in (first, second):
            with pytest.raises(EngineError, match=r"RuntimeError: a fault$"):
                await outputs_of(generation)
        assert async_llm.health().status is Status.OK
        assert async_llm.health().num_faults == 1
        third = await async_llm.generate([[5]], params(3))
        assert len(await outputs_of(third)) == 1

    run(test)


def test_while_it_drains_what_is_there_goes_on_and_nothing_comes(run: Callable[..., None]) -> None:
    async def test(async_llm: AsyncLLM) -> None:
        generation = await async_llm.generate([[5]], params(20))
        async_llm.drain()
        assert async_llm.health().status is Status.DRAINING
        with pytest.raises(DrainingError):
            await async_llm.generate([[5]], params(20))
        assert len(await outputs_of(generation)) == 1

    run(test)


def test_the_end_of_the_thread_is_told_to_those_who_wait(run: Callable[..., None]) -> None:
    async def test(async_llm: AsyncLLM) -> None:
        generation = await async_llm.generate([[5]], params(100))
        await async_llm.stop()
        with pytest.raises(Exception, match="shut down"):
            await outputs_of(generation)
        with pytest.raises(EngineError):
            await async_llm.generate([[5]], params(4))

    run(test)
