"""Tessera's engine as a peer: `python -m benchmarks.peers.tessera MODEL QUANTIZATION`."""

import sys

from benchmarks.peers.driver import keep_stdout, serve

if __name__ == "__main__":
    model, quantization = sys.argv[1:]
    out = keep_stdout()

    from tessera_cli.settings import prepare_process

    prepare_process(offline=True)  # as the command line does

    from tessera_cli import __version__
    from tessera_cli.engine.sampling_params import SamplingParams
    from tessera_cli.serving.llm import LLM

    llm = LLM(model, dtype="float32", quantization=quantization, max_num_seqs=64, max_model_len=2048)
    engine = llm.engine

    def add(request_id: str, prompt: list[int], output_len: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        engine.add_request(request_id, prompt, params)

    def step() -> list[tuple[str, list[int], bool]]:
        outputs = engine.step()
        return [(out.request_id, out.new_token_ids, out.finish_reason is not None) for out in outputs]

    serve(out, __version__, add, step)
