"""Rows of a dataset that `datasets` loads: from the Hugging Face hub or from a directory."""

from collections.abc import Iterator
from pathlib import Path

from tessera_cli.distill.data.row_files import PlacedRow, without_nulls
from tessera_cli.errors import DataError
from tessera_cli.recipe.data_section import DataSource


def dataset_rows(source: DataSource, *, streaming: bool) -> Iterator[PlacedRow]:
    """The rows of the split that `source` names.

    A dataset of the hub is downloaded once, into the Hugging Face cache, unless it is `streaming`. A
    directory is always read from its files: a cache would be keyed by name and time, not by content.

    Raises:
        DataError: no such dataset, configuration, split or revision, or no way to it.
    """
    import datasets

    number = 0
    is_local = Path(str(source.dataset)).is_dir()
    datasets.disable_progress_bars()  # they would be drawn into the live view
    try:
        rows = datasets.load_dataset(
            source.dataset,
            name=source.name,
            split=source.split,
            revision=source.revision,
            streaming=streaming or is_local,
        )
        for row in rows:
            number += 1
            yield f"{source.place} row {number}", without_nulls(row)
    except MemoryError:
        raise
    except Exception as error:  # a dataset is anybody's files in any form, and each reader has its own errors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{source.place} cannot be read after {number} rows: {reason}", hint=_hint(error, is_local)
        ) from error


def _hint(error: Exception, is_local: bool) -> str:
    if isinstance(error, ConnectionError):
        return "check the name and the network; offline, only what was downloaded before is there"
    if is_local:
        return "the directory has to hold what `datasets.load_dataset` reads"
    return "check `dataset`, `name`, `split` and `revision`; a private one needs `hf auth login`"
