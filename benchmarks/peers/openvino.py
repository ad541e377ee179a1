"""OpenVINO GenAI as a peer: `PYTHON -m benchmarks.peers.openvino CONVERTED_MODEL PRECISION THREADS`."""

import sys

from benchmarks.peers.driver import keep_stdout, serve

if __name__ == "__main__":
    model, precision, threads = sys.argv[1:]
    out = keep_stdout()

    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_seqs = 64
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(
        model,
        scheduler_config=scheduler,
        device="CPU",
        properties={"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": int(threads)},
    )
    handles = {}

    def add(request_id: str, prompt: list[int], output_len: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_len, True, False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        handles[request_id] = pipeline.add_request(int(request_id), ids, config)

    def step() -> list[tuple[str, list[int], bool]]:
        pipeline.step()
        outputs = []
        for request_id, handle in list(handles.items()):
            done = handle.get_status() == genai.GenerationStatus.FINISHED
            tokens = []
            while handle.can_read():
                tokens += [token for output in handle.read().values() for token in output.generated_ids]
            if done:
                del handles[request_id]
            if tokens or done:
                outputs.append((request_id, tokens, done))
        return outputs

    serve(out, genai.__version__, add, step)
