"""How close a student is to its teacher on documents that neither is trained on."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from tessera_cli.distill.data.corpus import Document, TrainBatch, build_batch
from tessera_cli.distill.data.packing import pack_rows
from tessera_cli.distill.evaluation.held_out import measured_documents
from tessera_cli.distill.events import Evaluated
from tessera_cli.distill.losses.dense import forward_kl
from tessera_cli.distill.students.student import forward_batch
from tessera_cli.errors import ModelError
from tessera_cli.models.decoder import Decoder


def held_out_batches(
    documents: Sequence[Document], *, max_targets: int, max_seq_len: int, rows_per_batch: int
) -> list[TrainBatch]:
    """The documents that every evaluation sees, see `measured_documents`, in packed rows."""
    chosen = measured_documents(documents, max_targets=max_targets)
    lengths = [len(document.token_ids) for document in chosen]
    rows = list(pack_rows(range(len(chosen)), lengths, max_seq_len=max_seq_len, packing=True))
    return [
        build_batch(chosen[index] for row in rows[start : start + rows_per_batch] for index in row)
        for start in range(0, len(rows), rows_per_batch)
    ]


class Evaluator:
    """Compares students with one teacher on fixed batches.

    The teacher runs once: its hidden states at the places that predict a target are kept, in its own dtype,
    in host memory (`2 x hidden_size` bytes a target in bfloat16). Logits are made `chunk_tokens` targets at
    a time. With `teacher_hidden`, a tensor for each batch, only the teacher's head is used.
    """

    def __init__(
        self,
        teacher: Decoder,
        batches: Sequence[TrainBatch],
        *,
        chunk_tokens: int,
        teacher_hidden: list[Tensor] | None = None,
    ) -> None:
        self._teacher = teacher
        self._batches = batches
        self._chunk_tokens = chunk_tokens
        self._teacher_hidden = teacher_hidden

    @torch.no_grad()  # a sharded student cannot be trained on tensors of inference mode
    def evaluate(self, student: Decoder, *, step: int) -> Evaluated:
        """Figures of `student`, at temperature 1, as means over all targets, summed in float64.

        Raises:
            ModelError: a model's logits are not finite.
        """
        if self._teacher_hidden is None:
            self._teacher_hidden = [_target_hidden(self._teacher, batch).cpu() for batch in self._batches]
        sums = torch.zeros(6, dtype=torch.float64)
        for batch, teacher_hidden in zip(self._batches, self._teacher_hidden, strict=True):
            student_hidden = _target_hidden(student, batch)
            for teacher_part, student_part, target_ids in zip(
                teacher_hidden.split(self._chunk_tokens),
                student_hidden.split(self._chunk_tokens),
                batch.target_ids.split(self._chunk_tokens),
                strict=True,
            ):
                teacher_log_probs = _log_probs(self._teacher, teacher_part)
                sums += _compare(teacher_log_probs, _log_probs(student, student_part), target_ids)
        num_tokens = sum(len(batch.target_ids) for batch in self._batches)
        kl, teacher_nll, student_nll, top1, top5, acceptance = (sums / num_tokens).tolist()
        if not math.isfinite(kl):
            whose = "student" if math.isfinite(teacher_nll) else "teacher"
            raise ModelError(f"the {whose}'s logits on the held-out documents are not finite")
        return Evaluated(
            step=step,
            num_tokens=num_tokens,
            kl=kl,
            cross_entropy=student_nll,
            student_perplexity=_perplexity(student_nll),
            teacher_perplexity=_perplexity(teacher_nll),
            top1_agreement=top1,
            top5_agreement=top5,
            acceptance=acceptance,
        )


def _target_hidden(decoder: Decoder, batch: TrainBatch) -> Tensor:
    hidden = forward_batch(decoder, batch)
    return hidden[batch.target_index.to(hidden.device)]


def _log_probs(decoder: Decoder, hidden: Tensor) -> Tensor:
    head = decoder.head_weight
    # As in the loss: the projection itself is float32, a later cast would keep the rounding of a lower dtype.
    return torch.log_softmax(linear(hidden.to(head.device).float(), head.float()), dim=-1)


def _compare(teacher: Tensor, student: Tensor, target_ids: Tensor) -> Tensor:
    """Sums over a chunk, float64 `[6]`: KL, both negative log-likelihoods, agreement at 1 and 5, Σ min(p, q).

    The last is speculative decoding's expected acceptance (arXiv 2211.17192). Log-probabilities `[n, vocab]`.
    """
    targets = target_ids.to(teacher.device)[:, None]
    choices = teacher.argmax(-1)
    top5 = student.topk(min(5, student.shape[-1]), -1).indices
    per_token: Iterable[Tensor] = (
        forward_kl(teacher, student),
        -teacher.gather(1, targets)[:, 0],
        -student.gather(1, targets)[:, 0],
        choices == student.argmax(-1),
        (choices[:, None] == top5).any(-1),
        torch.minimum(teacher, student).exp().sum(-1),
    )
    return torch.stack([values.double().sum() for values in per_token]).cpu()


def _perplexity(negative_log_likelihood: float) -> float:
    """e^x, infinite where a float64 cannot hold it."""
    return math.exp(negative_log_likelihood) if negative_log_likelihood < 709 else math.inf
