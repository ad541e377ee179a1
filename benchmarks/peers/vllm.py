"""vLLM's CPU build as a peer: `PYTHON -m benchmarks.peers.vllm MODEL DTYPE`, compiled, in process."""

import sys

from benchmarks.peers.driver import keep_stdout, serve

if __name__ == "__main__":
    model, dtype = sys.argv[1:]
    out = keep_stdout()

    import vllm
    from vllm import EngineArgs, LLMEngine, SamplingParams

    engine = LLMEngine.from_engine_args(
        EngineArgs(model=model, dtype=dtype, max_num_seqs=64, max_model_len=2048)
    )
    told: dict[str, int] = {}

    def add(request_id: str, prompt: list[int], output_len: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        told[request_id] = 0
        engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step() -> list[tuple[str, list[int], bool]]:
        outputs = []
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            outputs.append((output.request_id, tokens[told[output.request_id] :], output.finished))
            told[output.request_id] = len(tokens)
        return outputs

    serve(out, vllm.__version__, add, step)
