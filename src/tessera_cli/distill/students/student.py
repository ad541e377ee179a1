"""The student: some of the teacher's layers, with the teacher's embeddings, norm and head."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera_cli.distill.data.corpus import TrainBatch
from tessera_cli.distill.students.layer_operators import training_operators
from tessera_cli.kernels.packed import PackedAttention
from tessera_cli.models.decoder import Decoder
from tessera_cli.models.operators import Operators


def build_student(teacher: Decoder, layers: Sequence[int]) -> Decoder:
    """A float32 decoder of the teacher's `layers` (increasing, from 0), each with its window and rotation.

    Its tensors are copies. All layers give the teacher's own logits.
    """
    device = teacher.head_weight.device
    student = Decoder(teacher.config.with_layers(layers), dtype=torch.float32, device=device)
    source = teacher.state_dict()
    with torch.no_grad():
        for name, target in student.state_dict().items():
            target.copy_(source[_teacher_name(name, layers)])
    return student


@torch.inference_mode()
def layer_importance(teacher: Decoder, batches: Iterable[TrainBatch]) -> list[float]:
    """How much each layer turns the hidden state: mean over tokens of 1 - cos(its input, its output).

    ShortGPT's block influence (arXiv 2403.03853), accumulated in float64.
    """
    totals = torch.zeros(len(teacher.layers), dtype=torch.float64)
    num_tokens = 0
    handles = [
        layer.register_forward_hook(_accumulate(totals, index)) for index, layer in enumerate(teacher.layers)
    ]
    try:
        for batch in batches:
            num_tokens += len(batch.input_ids)
            forward_batch(teacher, batch)
    finally:
        for handle in handles:
            handle.remove()
    return (totals / num_tokens).tolist()


def forward_batch(decoder: Decoder, batch: TrainBatch, operators: Operators | None = None) -> Tensor:
    """Final hidden states `[num_tokens, hidden]` of a batch, its documents isolated from each other.

    Without `operators` they are `training_operators`.
    """
    device = decoder.device
    operators = operators or training_operators()
    attention = PackedAttention(batch.cu_seqlens, decoder.attention_layers, device=device)
    return decoder(batch.input_ids.to(device), batch.positions.to(device), attention.attend, operators)


def _accumulate(totals: Tensor, index: int):
    def hook(_: nn.Module, arguments: tuple, output: Tensor) -> None:
        cosine = F.cosine_similarity(arguments[1].float(), output.float(), dim=-1)
        totals[index] += (1 - cosine.double()).sum().cpu()

    return hook


def _teacher_name(name: str, layers: Sequence[int]) -> str:
    if not name.startswith("layers."):
        return name
    _, index, rest = name.split(".", 2)
    return f"layers.{layers[int(index)]}.{rest}"
