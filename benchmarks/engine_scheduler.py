"""What the scheduler costs, in processor time: a step of many decodes, and admission from the prefix cache.

python benchmarks/engine_scheduler.py
"""

import gc
import statistics
import time

from tessera_cli.engine.config import EngineConfig
from tessera_cli.engine.sampling_params import SamplingParams
from tessera_cli.engine.scheduler import Scheduler
from tessera_cli.engine.sequence import Sequence

NUM_SEQUENCES = 256
NUM_TOKENS = 1000
PROMPT_LEN = 4096


def make_scheduler() -> Scheduler:
    config = EngineConfig(
        num_blocks=40_000, max_model_len=8192, max_num_seqs=NUM_SEQUENCES, max_num_batched_tokens=8192
    )
    return Scheduler(config, eos_token_ids=(0,))


def step(scheduler: Scheduler) -> tuple[float, float]:
    """Run one step with token 1 for everyone; the seconds of `schedule` and of `commit`."""
    started = time.thread_time()
    output = scheduler.schedule()
    scheduled = time.thread_time()
    tokens = {item.sequence.key: [1] * item.num_samples for item in output.scheduled if item.num_samples}
    before_commit = time.thread_time()
    scheduler.commit(output, tokens)
    return scheduled - started, time.thread_time() - before_commit


def decodes(num_steps: int = 200) -> list[tuple[float, float]]:
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    for index in range(NUM_SEQUENCES):
        scheduler.add(Sequence(f"r{index}", [index + 1] * NUM_TOKENS, params))
    while scheduler.num_waiting or any(s.num_output_tokens == 0 for s in scheduler.queues.running):
        step(scheduler)
    return [step(scheduler) for _ in range(num_steps)]


def admissions(num_times: int = 20) -> list[float]:
    """Seconds of `schedule` for a prompt that is cached whole, its digests not yet known."""
    scheduler = make_scheduler()
    params = SamplingParams(max_tokens=1)
    seconds = []
    for index in range(num_times + 1):
        scheduler.add(Sequence(f"r{index}", [1 + position % 1000 for position in range(PROMPT_LEN)], params))
        seconds.append(step(scheduler)[0])
    found = scheduler.prefix_cache.num_hits
    assert found == num_times * (PROMPT_LEN - scheduler.config.block_size), found
    return seconds[1:]


def report(name: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    worst = ordered[int(len(ordered) * 0.99)]
    median = statistics.median(seconds)
    print(f"{name:44} {1e3 * median:7.3f} {1e3 * ordered[0]:7.3f} {1e3 * worst:7.3f}")


def main() -> None:
    print(f"{'milliseconds':44} {'median':>7} {'best':>7} {'p99':>7}")
    pairs = decodes()
    gc.collect()
    name = f"{NUM_SEQUENCES} decodes of {NUM_TOKENS} tokens"
    report(f"{name}: schedule", [one for one, _ in pairs])
    report(f"{name}: commit", [other for _, other in pairs])
    report(f"{name}: both", [sum(pair) for pair in pairs])
    report(f"admission of {PROMPT_LEN} cached tokens", admissions())


if __name__ == "__main__":
    main()
