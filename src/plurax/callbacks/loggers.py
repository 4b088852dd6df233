"""Log the rows of a run elsewhere: files of one's own, MLflow, Weights & Biases.

`fit(output=...)` writes `metrics.jsonl` and TensorBoard events by itself. A logger is a callback,
so it also sees what callbacks before it have added to a row: put loggers last.
"""

import abc
import contextlib
import csv
import importlib
import io
import tomllib
from pathlib import Path
from typing import Any

from plurax import errors
from plurax.disk import AppendFile, log_errors, make_folder, replace_file
from plurax.train.board import Board
from plurax.train.hooks import Run
from plurax.train.log import Row, encode_row, read_rows
from plurax.validate import whole_number


class Logger(abc.ABC):
    """Writes rows of epochs somewhere, in the first process only."""

    def on_start(self, run: Run) -> None:
        """Open; a run that is resumed goes on after its step."""
        if run.is_primary:
            self._open(run)

    def on_epoch(self, run: Run, row: Row) -> None:
        """Write an epoch."""
        if run.is_primary:
            self._write(row)

    def on_save(self, run: Run, step: int) -> None:
        """Write to disk what a checkpoint shall not be ahead of."""
        if run.is_primary:
            self._flush()

    def on_stop(self, run: Run) -> None:
        """Close; an error that ends training is not replaced by one of the disk."""
        if run.is_primary:
            with contextlib.suppress(*(errors.DiskError,) if run.failed else ()):
                self._close(run)

    @abc.abstractmethod
    def _open(self, run: Run) -> None: ...

    @abc.abstractmethod
    def _write(self, row: Row) -> None: ...

    def _flush(self) -> None:  # noqa: B027  what sends at once has nothing to do
        """Return when all is on disk that was written; raise `DiskError` where it is not."""

    @abc.abstractmethod
    def _close(self, run: Run) -> None: ...


class StepLogger(Logger):
    """Writes rows of steps, too.

    **Arguments:** `every`, steps between those that are written; rows of epochs always are.

    Raises `TaskError` for another number.
    """

    def __init__(self, every: int = 1) -> None:
        count = whole_number(every)
        if count is None:
            raise errors.callback_count(type(self).__name__, "every", every)
        self._every = count

    def on_step(self, run: Run, row: Row) -> None:
        """Write a step."""
        if run.is_primary and row["step"] % self._every == 0:
            self._write(row)


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
        self._rows.append(_numbers(row))
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


class TensorBoard(StepLogger):
    """Write numbers to TensorBoard events in a directory; `output` has its own already."""

    def __init__(self, directory: str | Path, *, every: int = 10) -> None:
        super().__init__(every)
        self._directory = Path(directory)

    def _open(self, run: Run) -> None:
        with log_errors(self._directory):
            self._board = Board(self._directory, run.step + 1 if run.step else None)

    def _write(self, row: Row) -> None:
        self._board.scalars(_named(row), row["step"])

    def _flush(self) -> None:
        with log_errors(self._directory):
            self._board.file.flush()

    def _close(self, run: Run) -> None:
        with log_errors(self._directory):
            self._board.file.close()


class Mlflow(StepLogger):
    """Log to MLflow: settings as parameters, rows as metrics.

    A run that is resumed goes on in the same run of MLflow.

    **Arguments:** `experiment`, its name; `tracking_uri`, default what MLflow is set to (the
    environment variable `MLFLOW_TRACKING_URI`); `name`, of the run.

    Raises `MissingPackageError` without `mlflow` or `mlflow-skinny`.
    """

    def __init__(
        self,
        experiment: str = "plurax",
        *,
        tracking_uri: str | None = None,
        name: str | None = None,
        every: int = 10,
    ) -> None:
        super().__init__(every)
        self._experiment, self._uri, self._name = experiment, tracking_uri, name
        self._id: str | None = None
        self._mlflow = _imported("mlflow", "Mlflow")

    def _open(self, run: Run) -> None:
        self._client = self._mlflow.MlflowClient(self._uri)
        if self._id is not None:
            self._client.update_run(self._id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id if found else self._client.create_experiment(self._experiment)
        )
        self._id = self._client.create_run(experiment, run_name=self._name).info.run_id
        for name, value in _settings(run).items():
            self._client.log_param(self._id, name, value)

    def _write(self, row: Row) -> None:
        metric = self._mlflow.entities.Metric
        metrics = [metric(name, value, 0, row["step"]) for name, value in _named(row).items()]
        self._client.log_batch(self._id, metrics)

    def _close(self, run: Run) -> None:
        self._client.set_terminated(self._id, "FAILED" if run.failed else "FINISHED")

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"id": self._id}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self._id = state["id"]


class Wandb(StepLogger):
    """Log to Weights & Biases: settings as configuration, rows as history.

    A run that is resumed goes on in the same run there.

    **Arguments:** `project`; `name`, of the run; `options`, further arguments of `wandb.init`, of
    which `config` is added to the settings.

    What you log besides, such as pictures, needs the step of the rows:
    `wandb.run.log({...}, step=run.step)` in a callback. Without it the client counts its own steps,
    and leaves out rows of a step before.

    Raises `MissingPackageError` without `wandb`.
    """

    def __init__(
        self, project: str = "plurax", *, name: str | None = None, every: int = 10, **options: Any
    ) -> None:
        super().__init__(every)
        self._options = {"project": project, "name": name, **options}
        self._id: str | None = None
        self._wandb = _imported("wandb", "Wandb")

    def _open(self, run: Run) -> None:
        again = {"id": self._id, "resume": "allow"} if self._id else {}
        options = {**self._options, **again}
        options["config"] = {**_settings(run), **(options.get("config") or {})}
        self._run = self._wandb.init(**options)
        self._id = self._run.id

    def _write(self, row: Row) -> None:
        self._run.log(_named(row), step=row["step"])

    def _close(self, run: Run) -> None:
        self._run.finish(exit_code=int(run.failed))

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"id": self._id}

    def set_state(self, state: dict[str, Any]) -> None:
        """Take what a checkpoint kept."""
        self._id = state["id"]


def _numbers(row: Row) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def _named(row: Row) -> dict[str, float]:
    """Return the numbers of a row by names like `step/loss`."""
    numbers = {name: value for name, value in _numbers(row).items() if name != "step"}
    return {f"{row['kind']}/{name}": value for name, value in numbers.items()}


def _settings(run: Run) -> dict[str, Any]:
    """Return what the run was started with: its settings, and the fields of its plan."""
    plan = tomllib.loads(run.program.plan.to_toml())
    members = {} if run.members is None else {"members": run.members.count}
    return {**run.settings, **{f"plan.{name}": value for name, value in plan.items()}, **members}


def _imported(package: str, callback: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise errors.package_missing(callback, package, package) from None
