"""The records of a run in progress: on disk as soon as they exist, a record file when the run is done."""

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from dsv4lab import records
from dsv4lab.records import Record


class Journal:
    """Keeps what is added in `<experiment>_<gpu>_<time>.partial`; `finish` turns that into a record file.

    A run that is killed leaves the `.partial` file, whole up to its last record, and so does one that ends a `with`
    block by an error, if there are any records. directory: None is the records folder of the checkout. resume: takes
    up the newest such file whose records all pass it, if there is one.
    """

    def __init__(
        self,
        experiment: str,
        gpu: str | None,
        directory: Path | str | None,
        resume: Callable[[Record], bool] | None = None,
    ):
        self.experiment = experiment
        self.directory = records.root() if directory is None else Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.records: list[Record] = []
        of_this = f"{experiment}_{records.gpu_slug(gpu)}_"
        for path in sorted(self.directory.glob(f"{of_this}*.partial"), reverse=True) if resume else ():
            kept = records.read_partial(path)
            if kept and all(map(resume, kept)):
                self.path, self.records = path, kept
                return
        self.path = self.directory / f"{of_this}{datetime.now(UTC):%Y%m%dT%H%M%SZ}.partial"
        self.path.touch(exist_ok=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abandon(error, worth_keeping=bool(self.records))

    def add(self, new: Sequence[Record]) -> None:
        self.records += new
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(record.model_dump_json(by_alias=True) + "\n" for record in new)
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> Path:
        """Writes the record file and returns its path."""
        path = records.write(self.records, self.experiment, self.directory)
        self.path.unlink()
        return path

    def abandon(self, error: BaseException, worth_keeping: bool) -> str | None:
        """Drops the `.partial` file, or keeps it and says where it is, in a note of `error` too."""
        if not worth_keeping:
            self.path.unlink()
            return None
        message = f"what was measured until then is in {self.path}"
        error.add_note(message)
        return message
