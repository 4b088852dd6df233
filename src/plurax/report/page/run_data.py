"""Read the folder of a run into plain values, for `plurax report` and `plurax watch`.

Only files are read, each leniently: a run may be going on, may have been killed, or may have been
written by another version. What cannot be read is left out.

    metrics.jsonl       rows of kind step, epoch and event     RunData.series
    run.toml            how the run was started                RunData.settings
                        and what was compiled                  RunData.compiled
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
from typing import Any, TypeVar

from plurax import errors
from plurax.checkpoint.lock import LOCK, writer_of
from plurax.loop.log_rows import Row, read_row
from plurax.machine import Machine
from plurax.plan import Plan
from plurax.reading import parse_json, parse_toml, read_text
from plurax.report.run_series import RunSeries
from plurax.run_folder.log import LOG_FILE
from plurax.run_folder.log_check import damage_row, log_damage
from plurax.server.record import Event, read_events
from plurax.user_frames import warn

T = TypeVar("T")

MOST_EVENTS = 200_000
"""Lines of `servers.jsonl` that are read: the last ones."""


@dataclasses.dataclass(frozen=True, eq=False)
class RunData:
    """What the files of a run say. See the module."""

    path: Path
    name: str
    series: RunSeries
    settings: Mapping[str, Any]
    compiled: Mapping[str, Any]
    plan: Plan | None
    machine: Machine | None
    servers: Sequence[Event]
    starts: Sequence[Row]
    calibration: Mapping[str, Any]
    set_aside: int
    going_on: bool


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
    series, damage = RunSeries(LogTail(log).read()), _read(lambda: log_damage(path))
    if not series.step:
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
        series.add([damage_row(*damage)])
    compiled = _read(lambda: parse_toml(read_text(path / "run.toml"))["compiled"])
    return RunData(
        path=path,
        name=path.name if name is None else name,
        series=series,
        settings=read_settings(path / "run.toml"),
        compiled=compiled if isinstance(compiled, Mapping) else {},
        plan=_read(lambda: Plan.load(path / "plan.toml")),
        machine=_read(lambda: Machine.load(path / "machine.toml")),
        servers=(_read(lambda: read_events(path / "servers.jsonl")) or [])[-MOST_EVENTS:],
        starts=_json_lines(path / "starts.jsonl"),
        calibration=_json_table(path / "calibration.json"),
        set_aside=len(list(path.glob("before.*"))),
        going_on=bool(writer_of(path / "checkpoints" / LOCK)),
    )


def run_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of runs: those that are given, and those in a given folder of runs.

    Raises `ExperimentError` for a folder in which there are none.
    """
    folders: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise errors.ExperimentError(
                f"{path}: no such folder. Give the output directory of a run, which "
                "`fit(output=...)` and plurax train write, such as runs/digits."
            )
        if (path / LOG_FILE).is_file():
            folders.append(path)
            continue
        inside = [
            log.parent for log in (*path.glob(f"*/{LOG_FILE}"), *path.glob(f"*/*/{LOG_FILE}"))
        ]
        inside = sorted(folder for folder in inside if not folder.name.startswith("before."))
        if not inside:
            raise errors.report_not_a_run(str(path))
        folders += inside
    return list(dict.fromkeys(folders))


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
    joined: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            joined |= flat(value, f"{prefix}{name}.")
        else:
            joined[f"{prefix}{name}"] = value
    return joined


def _read(read: Callable[[], T]) -> T | None:
    """Return what a file says, None where it is not there or cannot be read."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return read()
    return None


def _json_table(path: Path) -> dict[str, Any]:
    table = _read(lambda: parse_json(read_text(path)))
    return table if isinstance(table, dict) else {}


def _json_lines(path: Path) -> list[Row]:
    """Return the rows of a file of JSON lines; lines that are not tables are left out."""
    lines = _read(lambda: path.read_text(encoding="utf-8").splitlines()) or []
    rows = [_read(lambda line=line: parse_json(line)) for line in lines]  # type: ignore[misc]
    return [row for row in rows if isinstance(row, dict)]
