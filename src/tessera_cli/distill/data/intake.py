"""Which documents a run takes, and what is told of the others."""

from dataclasses import dataclass

from tessera_cli.distill.data.document import Document


@dataclass
class Intake:
    """Decides on documents one by one, and counts.

    Attributes:
        max_seq_len: tokens of a row; a longer document is left out.
        answer_tokens: tokens that the student's own answer to a prompt may have; None where it gives none.
        num_read: documents looked at.
        num_too_long: of them longer than a row.
        num_without_room: of them with a prompt that leaves a whole answer no room in a row.
        num_unsupervised: of them without a target.
        num_without_prompt: of those taken, they have nothing that the student could answer.
        num_cut: answers of the teacher that were cut.
    """

    max_seq_len: int
    answer_tokens: int | None = None
    num_read: int = 0
    num_too_long: int = 0
    num_without_room: int = 0
    num_unsupervised: int = 0
    num_without_prompt: int = 0
    num_cut: int = 0

    @property
    def num_taken(self) -> int:
        return self.num_read - self.num_too_long - self.num_without_room - self.num_unsupervised

    def takes(self, document: Document) -> bool:
        """Whether `document` is trained on; counts it."""
        self.num_read += 1
        if len(document.token_ids) > self.max_seq_len:
            self.num_too_long += 1
        elif self.row_tokens(document) > self.max_seq_len:
            self.num_without_room += 1
        elif not document.supervised.any() and not (document.is_prompt and self.answer_tokens):
            self.num_unsupervised += 1
        else:
            self.num_without_prompt += document.num_prompt_tokens == 0
            return True
        return False

    def row_tokens(self, document: Document) -> int:
        """What a row keeps free for `document`: its tokens, or its prompt and an answer of any length."""
        prompt = document.num_prompt_tokens
        if self.answer_tokens is None or prompt == 0:
            return len(document.token_ids)
        return max(len(document.token_ids), prompt + self.answer_tokens)

    def notes(self, split: str) -> list[str]:
        """One line for each reason that documents of `split` were left out for, or are special."""
        told = {
            f"are longer than data.max_seq_len {self.max_seq_len} and are left out": self.num_too_long,
            f"have a prompt that leaves a whole answer no room in data.max_seq_len {self.max_seq_len} "
            "and are left out": self.num_without_room,
            "have no token to learn and are left out": self.num_unsupervised,
        }
        notes = [
            f"{split}: {count} of {self.num_read} documents {what}" for what, count in told.items() if count
        ]
        if self.answer_tokens is not None and self.num_without_prompt:
            notes.append(
                f"{split}: {self.num_without_prompt} of {self.num_taken} documents have no prompt, "
                "the student answers none of them"
            )
        if self.num_cut:
            notes.append(f"{split}: {self.num_cut} answers of the teacher are cut, and kept without an end")
        return notes
