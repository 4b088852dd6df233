"""Log the rows of a run to files of one's own: JSON lines, or a table."""

import contextlib
import csv
import io
from pathlib import Path
from typing import Any

from plurax.disk import AppendFile, log_errors, make_folder, replace_file
from plurax.loggers.logger import Logger, StepLogger
from plurax.loop.log_rows import Row, encode_row, numbers, read_rows
from plurax.loop.run import Run


class JsonLines(StepLogger):
    """Write rows to a file, one JSON object a line, as `metrics.jsonl` has them."""

    def __init__(self, path: str | Path, *, every: int = 1) -> None:
        super().__init__(every)
        self._path = Path(path)

    def _open(self, run: Run) -> None:
        kept = b""
        if run.step and self._path.exists():
            rows = [row for row in read_rows(self._path) if row["step"] <= run.step]
            kept = b"".join(map(encode_row, rows))
        with log_errors(self._path):
            make_folder(self._path.parent)
            replace_file(self._path, kept)
            self._file = AppendFile(self._path)

    def _write(self, row: Row) -> None:
        self._file.write(encode_row(row))

    def _flush(self) -> None:
        with log_errors(self._path):
            self._file.flush()

    def _close(self, run: Run) -> None:
        with log_errors(self._path):
            self._file.close()


class Csv(Logger):
    """Write the rows of epochs to a table with a column for each number.

    On a full disk rows wait in memory.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: AppendFile | None = None  # None: the whole table has to be written

    def _open(self, run: Run) -> None:
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] = []
        if run.step and self._path.exists():
            with self._path.open(newline="") as file:
                self._rows = [row for row in csv.DictReader(file) if _is_up_to(row, run.step)]
        with log_errors(self._path):
            make_folder(self._path.parent)
            self._write_anew()

    def _write(self, row: Row) -> None:
        self._rows.append(numbers(row))
        if self._file is not None and set(self._rows[-1]) <= set(self._columns):
            self._file.write(self._lines(self._rows[-1:]))
        else:
            with contextlib.suppress(OSError):  # the next row tries again, or the next flush
                self._write_anew()

    def _write_anew(self) -> AppendFile:
        """Write the whole table, because a row has a column that those before had not."""
        if self._file is not None:
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                file.close()
        self._columns = [*dict.fromkeys(name for one in self._rows for name in one)]
        header = dict(zip(self._columns, self._columns, strict=True))
        replace_file(self._path, self._lines([header, *self._rows]) if header else b"")
        self._file = AppendFile(self._path)
        return self._file

    def _lines(self, rows: list[dict[str, Any]]) -> bytes:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns).writerows(rows)
        return text.getvalue().encode()

    def _flush(self) -> None:
        with log_errors(self._path):
            (self._file or self._write_anew()).flush()

    def _close(self, run: Run) -> None:
        with log_errors(self._path):
            file, self._file = self._file or self._write_anew(), None
            file.close()


def _is_up_to(row: dict[str, Any], step: int) -> bool:
    """Return whether a line of a table is whole, and of a step that is not to come again."""
    return None not in row.values() and int(row["step"]) <= step
