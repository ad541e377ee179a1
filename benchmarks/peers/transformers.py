"""transformers' `generate` in static batches as a peer: `python -m benchmarks.peers.transformers MODEL`."""

import os
import sys
import time
from typing import Any

from benchmarks.peers.driver import answer, keep_stdout, summary

if __name__ == "__main__":
    (model_dir,) = sys.argv[1:]
    out = keep_stdout()

    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    def run(requests: list[tuple[list[int], int]], concurrency: int) -> dict[str, Any]:
        """Batches in order of arrival; each row is cut to its length, the longest sets the time."""
        start = time.perf_counter()
        added, first, last, tokens = {}, {}, {}, {}
        for begin in range(0, len(requests), concurrency):
            batch = requests[begin : begin + concurrency]
            width = max(len(prompt) for prompt, _ in batch)
            rows = [[0] * (width - len(prompt)) + prompt for prompt, _ in batch]
            mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch]
            longest = max(length for _, length in batch)
            out = model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                do_sample=False,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )
            now = time.perf_counter()
            for index, (row, (_, length)) in enumerate(zip(out.tolist(), batch, strict=True)):
                key = str(begin + index)
                added[key], first[key], last[key] = start, now, now
                tokens[key] = row[width : width + length]
        return summary(time.perf_counter() - start, added, first, last, tokens)

    answer(out, transformers.__version__, run, [os.getpid()])
