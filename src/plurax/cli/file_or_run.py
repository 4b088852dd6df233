"""FILE, or in its place the folder of a run, whose `run.toml` says how it was started.

plurax train runs/digits --epochs 50
    FILE         examples/digits.py      [command] file
    experiment   --experiment.width=64   [experiment]
    defaults     --batch-size 128, ...   [options], [command]
    plan         data=4                  [plan]
    then what the command line says      --epochs 50
"""

import dataclasses
import inspect
from pathlib import Path
from typing import Any, TypeVar

from plurax import errors
from plurax.cli.arguments import value
from plurax.cli.options import train_class
from plurax.distributed.environment import gang_of
from plurax.plan import MESH_AXES
from plurax.run_folder.run_file import RUN_FILE, RunSettings, read_run_file
from plurax.train.fit import fit

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class ExperimentSource:
    """Where the experiment comes from.

    **Fields:** `file`, that defines it; `run`, what the run remembers, None where FILE is given;
    `rest`, the other arguments of the command line.
    """

    file: Path
    run: RunSettings | None
    rest: list[str]

    @property
    def experiment(self) -> list[str]:
        """The arguments of the file's `experiment()`, those of the command line last."""
        return [*([] if self.run is None else tokens("--experiment", self.run.experiment)),
                *self.rest]  # fmt: skip

    @property
    def devices(self) -> list[str]:
        """The arguments that say how many devices are needed, those of the command line last."""
        if self.run is None:
            return self.rest
        asked = self.run.options.get("devices")
        own = [f"--devices={asked}"] if asked is not None and gang_of() is None else []
        if self.run.plan is not None:
            own += [f"--plan.{axis}={getattr(self.run.plan, axis)}" for axis in MESH_AXES]
        return [*own, *self.rest]


def file_or_run(arguments: list[str], command: str) -> ExperimentSource:
    """Read the first argument: FILE, or the folder of a run, after which FILE may stand.

    Raises `ExperimentError` for a folder that is none of a run, or whose FILE is not there.
    """
    if not arguments or arguments[0].startswith("-"):
        raise errors.ExperimentError(
            f"name the experiment file: plurax {command} FILE (it comes first). FILE is Python "
            "that defines experiment(); plurax --help shows an example."
        )
    first, rest = Path(arguments[0]), arguments[1:]
    if not first.is_dir():
        return ExperimentSource(first, None, rest)
    run = read_run_file(first)
    if run is None:
        raise errors.ExperimentError(
            f"{first} is a folder without a run.toml, so it is not that of a run. Write plurax "
            f"{command} FILE, where FILE is Python that defines experiment(), or the folder that "
            "plurax train wrote."
        )
    if rest and not rest[0].startswith("-"):
        return ExperimentSource(Path(rest[0]), run, rest[1:])
    return ExperimentSource(run_file_of(run, command), run, rest)


def run_file_of(run: RunSettings, command: str) -> Path:
    """Return the FILE of a run. Raises `ExperimentError` where it has none, or it is gone."""
    if run.file is None:
        raise errors.run_without_file(str(run.folder), command)
    if not run.file.is_file():
        raise errors.ExperimentError(
            f"{run.folder} was trained from {run.file}, which is not there any more. Say where it "
            f"is now: plurax {command} {run.folder} FILE"
        )
    return run.file


def with_remembered(options: T, run: RunSettings, rest: list[str]) -> T:
    """Return options with the values of a run as defaults, as far as they have them.

    Its folder is the output, and there training goes on, unless the command line says otherwise.
    """
    assert dataclasses.is_dataclass(options)
    assert not isinstance(options, type)
    names = {field.name for field in dataclasses.fields(options)}
    path, known = str(run.folder / RUN_FILE), [*names, *_remembered_names()]
    for name in run.options:
        if name not in known:
            raise errors.run_file_unknown(path, name, known)
    values: dict[str, Any] = {
        name: _like(getattr(options, name), saved, name, path)
        for name, saved in run.options.items()
        if name in names
    }
    if run.plan is not None:
        values["plan"] = run.plan
    if isinstance(getattr(options, "output", None), Path):
        values["output"] = run.folder
    if "resume" in names:
        values["resume"] = value(rest, "--output") is None and "--restart" not in rest
    return dataclasses.replace(options, **values)


def _remembered_names() -> list[str]:
    """Return the names that `plurax train` writes to `run.toml`, of which a command has a part."""
    train = [field.name for field in dataclasses.fields(train_class())]
    return [*train, *inspect.signature(fit).parameters]


def _like(default: Any, saved: Any, option: str, path: str) -> Any:
    if dataclasses.is_dataclass(default):
        if not isinstance(saved, dict):
            raise errors.run_file_value(path, option, saved, "a table")
        names = [f"{option}.{field.name}" for field in dataclasses.fields(default)]
        for name in saved:
            if f"{option}.{name}" not in names:
                raise errors.run_file_unknown(path, f"{option}.{name}", names)
        known = {name: _like(None, inner, name, path) for name, inner in saved.items()}
        return dataclasses.replace(default, **known)  # type: ignore[type-var]
    return tuple(saved) if isinstance(saved, list) else saved


def tokens(name: str, setting: Any) -> list[str]:
    """Return arguments that give a value again.

    >>> tokens("--experiment", {"learning_rate": 0.1, "deep": False, "sizes": [3, 4]})
    ['--experiment.learning-rate=0.1', '--experiment.no-deep', '--experiment.sizes', '3', '4']
    """
    if isinstance(setting, dict):
        return [
            token
            for inner, part in setting.items()
            for token in tokens(f"{name}.{inner.replace('_', '-')}", part)
        ]
    if isinstance(setting, bool):
        head, _, last = name.rpartition(".")
        return [name if setting else f"{head}.no-{last}"]
    if isinstance(setting, list):
        return [name, *map(str, setting)]
    return [f"{name}={setting}"]
