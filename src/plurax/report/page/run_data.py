"""Read the folder of a run into plain values, for `plurax report` and `plurax watch`.

Only files are read, each leniently: a run may be going on, may have been killed, or may have been
written by another version. What cannot be read is left out.

    metrics.jsonl       rows of kind step, epoch and event     RunData.steps, epochs, events
    run.toml            how the run was started                RunData.settings
    plan.toml           its plan                               RunData.plan
    machine.toml        the machine of its estimate            RunData.machine
    servers.jsonl       what workers and servers did           RunData.servers
    starts.jsonl        each time it was started or resumed    RunData.starts
    calibration.json    by `px.ensemble.save_calibration`      RunData.calibration
    before.1, ...       runs that were set aside               RunData.set_aside
    checkpoints/        whether a process writes there         RunData.going_on
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import numpy as np
from jaxtyping import Float

from plurax import errors
from plurax.checkpoint.lock import LOCK, writer_of
from plurax.loop.log_rows import KINDS, Row, read_row
from plurax.machine import Machine
from plurax.plan import Plan
from plurax.reading import parse_json, parse_toml, read_text
from plurax.run_folder.log import LOG_FILE
from plurax.run_folder.log_check import damage_row, log_damage
from plurax.server.record import Event, read_events
from plurax.user_frames import warn

T = TypeVar("T")

NOT_METRICS = frozenset(("kind", "step", "epoch", "weight", "examples", "skipped", "seconds"))
"""Numbers of a row that are no curve."""

MOST_EVENTS = 200_000
"""Lines of `servers.jsonl` that are read: the last ones."""


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """The values of a metric at some steps, both `(N,)`."""

    steps: Float[np.ndarray, "N"]
    values: Float[np.ndarray, "N"]


@dataclasses.dataclass(frozen=True, eq=False)
class RunData:
    """What the files of a run say. See the module."""

    path: Path
    name: str
    steps: Mapping[str, Series]
    epochs: Sequence[Row]
    evaluations: Sequence[Row]
    events: Sequence[Row]
    skipped: Sequence[int]
    settings: Mapping[str, Any]
    plan: Plan | None
    machine: Machine | None
    servers: Sequence[Event]
    starts: Sequence[Row]
    calibration: Mapping[str, Any]
    set_aside: int
    batch_size: int | None
    going_on: bool

    @property
    def last(self) -> Row:
        """The last row of an epoch, empty before the first."""
        return self.epochs[-1] if self.epochs else {}

    @property
    def final(self) -> Row:
        """The last value of each metric: after the last epoch, else of the last step."""
        if self.epochs:
            return self.last
        return {name: float(one.values[-1]) for name, one in self.steps.items()}

    @property
    def step(self) -> int:
        """The last step that was logged, 0 before the first."""
        ends = [int(one.steps[-1]) for one in self.steps.values()]
        return max([*ends, self.last.get("step", 0)], default=0)

    @property
    def members(self) -> int | None:
        """The number of members of a population, None for one network."""
        values = self.last.get("members")
        return max(map(len, values.values()), default=0) if isinstance(values, dict) else None

    @property
    def seconds(self) -> float:
        """Seconds of all epochs, without evaluation and saving."""
        return float(sum(row.get("seconds", 0.0) for row in self.epochs))

    def estimates(self) -> list[tuple[int, Row]]:
        """Return step and `estimate` of each epoch that was both predicted and measured."""
        found = [(row["step"], row.get("estimate")) for row in self.epochs]
        return [(step, one) for step, one in found if isinstance(one, dict)]


class LogTail:
    """Reads the rows that were appended to a `metrics.jsonl` since it was last read.

    A line that is not whole yet is read next time. A file that was replaced, as by a run that
    resumes or rolls back, is read again from its start, and `restarted` counts that.

    **Arguments:** `path`, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.restarted = path, 0
        self._offset = 0
        self._file: int | None = None

    def read(self) -> list[Row]:
        """Return the new rows; none where the file is not there."""
        try:
            with self.path.open("rb") as lines:
                file = os.fstat(lines.fileno())
                if file.st_ino != self._file or file.st_size < self._offset:
                    self.restarted += self._file is not None
                    self._offset, self._file = 0, file.st_ino
                lines.seek(self._offset)
                new = lines.read()
        except OSError:
            return []
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = map(read_row, whole.splitlines(keepends=True))
        return [row for row in rows if row is not None]


def read_run(path: Path, name: str | None = None) -> RunData:
    """Return what the files in the folder of a run say.

    Raises `ExperimentError` for a folder without `metrics.jsonl`, and where nothing is in it.
    """
    log = path / LOG_FILE
    if not log.is_file():
        raise errors.report_not_a_run(str(path))
    if not os.access(log, os.R_OK):
        raise errors.ExperimentError(
            f"{log} cannot be read: you have no permission. Ask its owner, or run as the user who "
            "trained."
        )
    rows, damage = LogTail(log).read(), _read(lambda: log_damage(path))
    kinds: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for row in rows:
        kinds[row["kind"]].append(row)
    if not kinds["step"] and not kinds["epoch"]:
        if damage is not None:
            raise errors.ExperimentError(
                f"{log} has no row of metrics, and a checkpoint of the run says that it had: "
                f"{damage[1]}. Put the file back from a copy; training with resume goes on without "
                "it."
            )
        raise errors.ExperimentError(
            f"{log} has no row of metrics yet: the run ended, or is still compiling, before its "
            "first step. plurax watch shows a run from its start."
        )
    if damage is not None:
        warn(f"{log}: {damage[1]}", errors.DamagedLogWarning)
        kinds["event"].append(damage_row(*damage))
    return RunData(
        path=path,
        name=path.name if name is None else name,
        steps=_series(kinds["step"]),
        epochs=kinds["epoch"],
        evaluations=[row for row in rows if row["kind"] in ("evaluation", "epoch")],
        events=kinds["event"],
        skipped=[row["step"] for row in kinds["step"] if row.get("skipped")],
        settings=read_settings(path / "run.toml"),
        plan=_read(lambda: Plan.load(path / "plan.toml")),
        machine=_read(lambda: Machine.load(path / "machine.toml")),
        servers=(_read(lambda: read_events(path / "servers.jsonl")) or [])[-MOST_EVENTS:],
        starts=_json_lines(path / "starts.jsonl"),
        calibration=_read(lambda: _json_table(path / "calibration.json")) or {},
        set_aside=len(list(path.glob("before.*"))),
        batch_size=max((row.get("examples", 0) for row in kinds["step"]), default=0) or None,
        going_on=bool(writer_of(path / "checkpoints" / LOCK)),
    )


def run_folders(given: Iterable[Path]) -> list[Path]:
    """Return the folders of runs: those that are given, and those in a given folder of runs.

    Raises `ExperimentError` for a folder in which there are none.
    """
    found: list[Path] = []
    for path in given:
        if not path.is_dir():
            raise errors.ExperimentError(
                f"{path}: no such folder. Give the output directory of a run, which "
                "`fit(output=...)` and plurax train write: plurax report runs/digits."
            )
        if (path / LOG_FILE).is_file():
            found.append(path)
            continue
        inside = [
            log.parent for log in (*path.glob(f"*/{LOG_FILE}"), *path.glob(f"*/*/{LOG_FILE}"))
        ]
        inside = sorted(one for one in inside if not one.name.startswith("before."))
        if not inside:
            raise errors.report_not_a_run(str(path))
        found += inside
    return list(dict.fromkeys(found))


def run_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest names that tell folders apart: what follows their common parent.

    >>> run_names([Path("runs/a/x"), Path("runs/b")]), run_names([Path("runs/digits")])
    (['a/x', 'b'], ['digits'])
    """
    whole = [path.absolute() for path in paths]
    if len(whole) < 2:
        return [path.name for path in whole]
    common = Path(os.path.commonpath(whole))
    names = [path.relative_to(common).as_posix() for path in whole]
    return [path.name if name == "." else name for name, path in zip(names, whole, strict=True)]


def read_settings(path: Path) -> dict[str, Any]:
    """Return a TOML file as one table: names of nested tables are joined by dots."""
    return flat(_read(lambda: parse_toml(read_text(path))) or {})


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one.

    >>> flat({"seed": 1, "plan": {"data": 4}})
    {'seed': 1, 'plan.data': 4}
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of a row is a number, and no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _series(rows: Sequence[Row]) -> dict[str, Series]:
    """Return each metric of the step rows over the steps that have it."""
    columns: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        step = row["step"]
        for name, value in row.items():
            if name not in NOT_METRICS and is_number(value):
                steps, values = columns.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return {
        name: Series(np.asarray(steps, np.float64), np.asarray(values, np.float64))
        for name, (steps, values) in columns.items()
    }


def _read(read: Callable[[], T]) -> T | None:
    """Return what a file says, None where it is not there or cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return read()
    return None


def _json_table(path: Path) -> dict[str, Any]:
    found = parse_json(read_text(path))
    return found if isinstance(found, dict) else {}


def _json_lines(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines; lines that are not tables are left out."""
    lines = _read(lambda: path.read_text(encoding="utf-8").splitlines()) or []
    rows = [_read(lambda line=line: parse_json(line)) for line in lines]  # type: ignore[misc]
    return [row for row in rows if isinstance(row, dict)]
