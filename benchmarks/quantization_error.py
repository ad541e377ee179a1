"""What each part of int8 costs: KL to the float32 model on documents, with only that part quantised.

    python benchmarks/quantization_error.py MODEL_DIRECTORY recipes/data/eval.jsonl

"in the engine" is all of it by the compiled products, whose activations are rounded too.
"""

import argparse
from pathlib import Path

import torch

from tessera_cli.distill.evaluation.quantization_cost import compare_decoders, read_documents
from tessera_cli.engine.loading import load_served_model
from tessera_cli.int8_weight import Int8Weight
from tessera_cli.models.checkpoint_tensors import checkpoint_tensors
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.loader import load_decoder

PARTS = {
    "attention": ("self_attn.",),
    "MLP": ("mlp.",),
    "embedding and head": ("embed_tokens.", "lm_head."),
    "all": ("self_attn.", "mlp.", "embed_tokens.", "lm_head."),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    arguments = parser.parse_args()
    batches, _ = read_documents(arguments.model, arguments.data, "messages", max_tokens=arguments.tokens)
    plain = load_decoder(arguments.model, dtype=torch.float32)
    print("quantised           KL, nats  same first choice  perplexity")
    for name, marks in PARTS.items():
        show(name, plain, rounded(arguments.model, marks), batches)
    served = load_served_model(arguments.model, torch.float32, "cpu", "int8", "cpu")
    assert isinstance(served, Decoder)
    show("in the engine", plain, served, batches)


@torch.no_grad()
def rounded(model: Path, marks: tuple[str, ...]) -> Decoder:
    """The float32 model with the matrices that have one of `marks` in their name rounded to int8."""
    decoder = load_decoder(model, dtype=torch.float32)
    for name, tensor in checkpoint_tensors(decoder):
        if tensor.dim() == 2 and any(mark in name for mark in marks):
            tensor.copy_(Int8Weight.quantise(tensor).dequantise())
    return decoder


def show(name: str, plain: Decoder, other: Decoder, batches: list) -> None:
    cost = compare_decoders(plain, other, batches)
    print(f"{name:18} {cost.kl:9.5f} {cost.top1_agreement:18.2%} {cost.int8_perplexity:11.4f}", flush=True)


if __name__ == "__main__":
    main()
