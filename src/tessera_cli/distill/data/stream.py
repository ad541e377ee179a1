"""Documents that are read as they are needed: once to lay out the run, and again to train.

The first reading keeps the fingerprint of all documents and of each its length, its number of targets, its
row and a checksum, 40 bytes. So a streamed run knows its every step beforehand, as any other does, and a
resumed one goes on where it was, or says that the data changed.
"""

import hashlib
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence

from tessera_cli.distill.data.corpus import add_to_fingerprint, check_not_empty
from tessera_cli.distill.data.document import Document, TrainOn, encode_document
from tessera_cli.distill.data.intake import Intake
from tessera_cli.distill.data.row_files import Row
from tessera_cli.distill.data.sources import read_rows
from tessera_cli.errors import DataError
from tessera_cli.models.tokenizer import Tokenizer
from tessera_cli.recipe.data_section import DataSource

_PlacedSource = tuple[str, Row, DataSource]


class DocumentStream:
    """The documents of some sources, one after the other, none of them kept.

    `lengths`, `supervised` and `row_tokens` (see `Corpus`) grow while `read_ahead` is consumed. `watched` are
    contents (see `Document.content`) that are looked out for.
    """

    def __init__(
        self,
        sources: Sequence[DataSource],
        tokenizer: Tokenizer,
        *,
        max_seq_len: int,
        train_on: TrainOn,
        answer_tokens: int | None,
        watched: frozenset[bytes] = frozenset(),
    ) -> None:
        self.lengths, self.supervised, self.row_tokens = array("q"), array("q"), array("q")
        self.intake = Intake(max_seq_len, answer_tokens)
        self._sources, self._tokenizer, self._train_on = tuple(sources), tokenizer, train_on
        self._row_numbers, self._checksums = array("q"), array("q")
        self._digest = hashlib.sha256()
        self._watched, self._came = watched, set[bytes]()

    @property
    def documents(self) -> tuple[Document, ...]:
        """Those in memory: none."""
        return ()

    def read_ahead(self) -> Iterator[int]:
        """The number of each document as it is read for the first time, from 0.

        Raises:
            DataError: as `load_corpus`.
        """
        for row_number, (where, row, source) in enumerate(self._rows()):
            document = self._encode(row, where, source)
            if self.intake.takes(document):
                add_to_fingerprint(self._digest, document)
                self._row_numbers.append(row_number)
                self._checksums.append(_checksum(document))
                if self._watched and (content := document.content) in self._watched:
                    self._came.add(content)
                self.supervised.append(document.num_supervised_tokens)
                self.row_tokens.append(self.intake.row_tokens(document))
                self.lengths.append(len(document.token_ids))
                yield len(self.lengths) - 1
        check_not_empty(self._sources, self.intake)

    def in_order(self, groups: Iterable[Sequence[int]], start: int = 0) -> Iterator[list[Document]]:
        """The documents of each group of numbers after the first `start` groups.

        Numbers are those of `read_ahead`; none comes twice before all have come. Rows that were passed are
        read again but not tokenised, and whole passes before `start` are not read at all.

        Raises:
            DataError: the rows are not those of the first reading.
        """
        reader = _Pass(self)
        for number, group in enumerate(groups):
            if number < start:
                for index in group:
                    reader = reader.skip(index)
                continue
            documents = []
            for index in group:
                reader, document = reader.take(index)
                documents.append(document)
            yield documents

    def having(self, contents: frozenset[bytes]) -> frozenset[bytes]:
        """See `Corpus.having`; of those that are watched, and as far as it was read."""
        return contents & self._came

    def notes(self, split: str) -> list[str]:
        """What the user should know of the documents of `split`, as far as they were read."""
        return self.intake.notes(split)

    def fingerprint(self) -> str:
        """SHA-256 over what was read: ids, targets and order."""
        return self._digest.hexdigest()

    def _rows(self) -> Iterator[_PlacedSource]:
        for source in self._sources:
            for where, row in read_rows(source, streaming=True):
                yield where, row, source

    def _encode(self, row: Row, where: str, source: DataSource) -> Document:
        return encode_document(row, where, source, self._tokenizer, self._train_on)


class _Pass:
    """One reading from the first row on; what is read before its turn waits as a row."""

    def __init__(self, stream: DocumentStream) -> None:
        self._stream = stream
        self._passed = bytearray(len(stream.lengths))
        self._waiting: dict[int, _PlacedSource] = {}
        self._rows = enumerate(stream._rows())
        self._next = 0

    def skip(self, index: int) -> "_Pass":
        """Pass over a document; a new pass, if this one has had it."""
        if self._passed[index]:
            return _Pass(self._stream).skip(index)
        self._passed[index] = True
        self._waiting.pop(index, None)
        return self

    def take(self, index: int) -> "tuple[_Pass, Document]":
        """A document, and the pass that read it."""
        if self._passed[index]:
            return _Pass(self._stream).take(index)
        while self._next <= index:
            self._read()
        self._passed[index] = True
        where, row, source = self._waiting.pop(index)
        document = self._stream._encode(row, where, source)
        if _checksum(document) != self._stream._checksums[index]:
            raise DataError(f"{where} changed while it was read", hint="start anew from data that rests")
        return self, document

    def _read(self) -> None:
        wanted = self._stream._row_numbers[self._next]
        for row_number, placed in self._rows:
            if row_number == wanted:
                if not self._passed[self._next]:
                    self._waiting[self._next] = placed
                self._next += 1
                return
        raise DataError(
            f"{', '.join(source.place for source in self._stream._sources)}: fewer rows than at first",
            hint="start anew from data that rests",
        )


def _checksum(document: Document) -> int:
    return zlib.crc32(document.supervised.tobytes(), zlib.crc32(document.token_ids.tobytes()))
