"""`run.toml`: how a run was started, written before its first step, and read by the command line.

started = "2026-05-04T09:30:00+00:00"
callbacks = ["EarlyStopping"]  # their names
[options]                     # arguments of fit; None as the command line writes it
epochs = 3
checkpoint_every = "None"
[command]                     # of plurax train: FILE, and options that fit has in another form
file = "/data/digits/digits.py"
[experiment]                  # arguments of the file's experiment()
width = 64
[plan]                        # as in plan.toml
data = 4
[members]  [servers]  [rollback]  [versions]  [devices]  [git]
[compiled]                    # the last table: what the compiler made of it, after the first epoch
seconds = 3.2                 # and more, `plurax.analysis.compiled_figures`
"""

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from plurax import __version__, errors
from plurax.disk import replace_file
from plurax.execute.program import Program
from plurax.members import Members
from plurax.plan import Plan
from plurax.reading import parse_toml
from plurax.toml_writer import toml_value, write_toml
from plurax.validate import local_path

RUN_FILE = "run.toml"
STARTS = "starts.jsonl"
"""One line each time the run was started: `step` and `time`."""

NOTE = "# How this run was started. The command line reads it where it is given this folder.\n"
VERSIONS = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint")
NOT_OPTIONS = frozenset(
    ("output", "resume", "restart", "command", "plan", "members", "machine", "servers", "rollback",
     "evaluation", "devices")
)  # fmt: skip
"""Arguments of `fit` that say where a run is, or that stand elsewhere in the file."""
TABLES = ("options", "command", "experiment", "plan", "members", "servers", "rollback", "versions",
          "devices", "git", "compiled")  # fmt: skip
MOST_HYPER = 10_000
"""The longest list of hyperparameters that is written."""
GIT_SECONDS = 5.0
"""How long git may take to answer, as in a large repository on a slow disk."""

Table = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RunSettings:
    """What a `run.toml` says.

    **Fields:** `folder`, of the run; `file`, its FILE, None where it was not trained by `plurax
    train`; `options`, of the command line by name, tables for those with a dot; `experiment`, the
    arguments of the file's `experiment()`; `plan`, None where it is not there; `compiled`, figures
    of the program that it trained with last, empty before its first epoch.
    """

    folder: Path
    file: Path | None
    options: Table
    experiment: Table
    plan: Plan | None
    compiled: Table = dataclasses.field(default_factory=dict)


def read_run_file(folder: str | Path) -> RunSettings | None:
    """Return what the `run.toml` of a folder says, None where it has none.

    Raises `ExperimentError` for a file that is not TOML, or not as `run_toml` writes it, and
    `PlanError` for its plan.
    """
    folder = local_path(folder)
    path = folder / RUN_FILE
    if not path.is_file():
        return None
    try:
        table: Table = parse_toml(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise errors.ExperimentError(
            f"{path} cannot be read: {error}. Mend it, or give the experiment file in place of the "
            "run's folder."
        ) from None
    _check_tables(table, str(path))
    command = table.get("command", {})
    file = command.pop("file", None)
    if file is not None and not isinstance(file, str):
        raise errors.run_file_value(str(path), "file", file, "a text")
    plan = Plan.from_table(table["plan"], str(path)) if "plan" in table else None
    options = {
        name: _read(value) for name, value in {**table.get("options", {}), **command}.items()
    }
    return RunSettings(
        folder, Path(file) if file else None, options, table.get("experiment", {}), plan,
        table.get("compiled", {}),
    )  # fmt: skip


def _check_tables(table: Table, path: str) -> None:
    for name, value in table.items():
        if name not in (*TABLES, "started", "callbacks"):
            raise errors.run_file_unknown(path, f"[{name}]", [f"[{one}]" for one in TABLES])
        if name in TABLES and not isinstance(value, dict):
            raise errors.run_file_value(path, name, value, "a table")


def experiment_values(command: Mapping[str, Any] | None) -> Table:
    """Return the arguments of the file's `experiment()`, for a checkpoint.

    Under `experiment`, by dotted name; nothing for a run that no command line has started.
    """
    if not command or "experiment" not in command:
        return {}
    values: Table = {}

    def add(prefix: str, table: Table) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                add(f"{prefix}{name}.", value)
            else:
                values[f"{prefix}{name}"] = json.loads(json.dumps(value, default=toml_value))

    add("", _as_table(command["experiment"]))
    return {"experiment": values}


def run_toml(arguments: Mapping[str, Any], program: Program) -> str:
    """Return the text of `run.toml`.

    **Arguments:**

    - `arguments`: those of `fit` by name, the `command` among them: what `plurax train` says of
      `file`, `experiment` and options that `fit` has in another form.
    - `program`: its program.
    """
    command = {**(arguments.get("command") or {})}
    command.pop("named", None)
    devices = list(program.mesh.devices.flat)
    folder = Path(command["file"]).parent if "file" in command else Path()
    tables = {
        "options": {name: value for name, value in arguments.items() if _is_option(name, value)},
        "experiment": command.pop("experiment", {}),
        "command": _given(command),
        "members": _members(program.members),
        "servers": arguments.get("servers"),
        "rollback": arguments.get("rollback"),
        "versions": versions(),
        "devices": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
            "processes": len({device.process_index for device in devices}),
        },
        "git": git_state(folder),
        "plan": program.plan.table(),
    }
    callbacks = [type(callback).__name__ for callback in arguments.get("callbacks", ())]
    started = {"started": utc_now(), **({"callbacks": callbacks} if callbacks else {})}
    return NOTE + write_toml({**started, **{name: _as_table(tables[name]) for name in tables}})


COMPILED = "\n[compiled]\n"


def note_compiled(folder: Path, figures: Table) -> None:
    """Write figures of the compiled program to `run.toml`, in place of those before.

    Raises `OSError`.
    """
    path = folder / RUN_FILE
    before, *_ = path.read_text("utf-8").partition(COMPILED)
    replace_file(path, (before + "\n" + write_toml({"compiled": figures}).lstrip()).encode())


def noted_compiled(folder: Path) -> str:
    """Return the table that `note_compiled` wrote, as it stands in the file; "" without any."""
    path = folder / RUN_FILE
    _, heading, rest = (path.read_text("utf-8") if path.is_file() else "").partition(COMPILED)
    return heading + rest


def utc_now() -> str:
    """Return the time, as `2026-05-04T09:30:00+00:00`."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> Table:
    """Return the versions of Python, plurax and what it computes with."""
    by_name = {"plurax": __version__, "python": platform.python_version()}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    return by_name


def git_state(folder: Path) -> Table:
    """Return `commit` and whether files differ from it (`dirty`); empty without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changed)} if changed is not None else {"commit": commit}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True, text=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _is_option(name: str, value: object) -> bool:
    plain = value is None or isinstance(value, bool | int | float | str | np.number)
    return plain and name not in NOT_OPTIONS


def _given(command: Mapping[str, Any]) -> Table:
    """Return the options that were given, and the tables of them."""
    tables = {name: _as_table(one) if _is_instance(one) else one for name, one in command.items()}
    return {
        name: _given(one) if isinstance(one, Mapping) else one
        for name, one in tables.items()
        if one is not None
    }


def _members(members: Members | None) -> Table:
    if members is None:
        return {}
    seeds = [row["seed"] for row in members.table()]
    hyper = {name: values.tolist() for name, values in members.hyper_table().items()}
    return {
        "count": members.count,
        **({} if seeds == list(range(members.count)) else {"seeds": seeds}),
        "resample": repr(members.resample),
        "hyper": {name: values for name, values in hyper.items() if len(values) <= MOST_HYPER},
    }


# --- TOML ----------------------------------------------------------------------------------------


def _read(value: Any) -> Any:
    """Return a value as it was before it was written."""
    if isinstance(value, dict):
        return {name: _read(inner) for name, inner in value.items()}
    return None if value == "None" else value


def _as_table(value: Any) -> Table:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if not isinstance(value, Mapping):
        return {}
    return {
        str(key): _as_table(one) if isinstance(one, Mapping) or _is_instance(one) else one
        for key, one in value.items()
    }


def _is_instance(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
