"""`plurax new` and `plurax examples`: files to begin with, which are in the package."""

import ast
import dataclasses
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Annotated

import tyro

import plurax
from plurax import errors
from plurax.cli.parser import parse_options
from plurax.validate import local_path

TEMPLATE = "template"
"""The example that `plurax new` writes."""


@dataclasses.dataclass(frozen=True)
class NewOptions:
    """Write an experiment that runs, to put your own data and network in."""

    file: tyro.conf.Positional[Path]
    """The file to write, such as experiment.py; one that is there stays."""


@dataclasses.dataclass(frozen=True)
class ExamplesOptions:
    """List the examples of this version, or write one of them here."""

    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None
    """The example to write; without it all are listed."""
    to: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path()
    """The folder to write it to."""


def new_command(arguments: list[str]) -> int:
    """Write the template."""
    file = local_path(parse_options(NewOptions, "plurax new", arguments).file)
    file = file / "experiment.py" if file.is_dir() else file.with_suffix(file.suffix or ".py")
    text, quoted = (examples_folder() / f"{TEMPLATE}.py").read_text("utf-8"), shlex.quote(str(file))
    _write(file, text.replace(f"{TEMPLATE}.py", quoted).replace(TEMPLATE, file.stem))
    print(f"wrote {file}\n\n  plurax train {quoted}")
    return 0


def examples_command(arguments: list[str]) -> int:
    """List the examples, or write one, with those it reads."""
    options = parse_options(ExamplesOptions, "plurax examples", arguments)
    known = examples()
    if options.name is None:
        width = max(map(len, known))
        for name, path in known.items():
            print(f"  {name:<{width}}  {_first_line(path)}")
        print("\nplurax examples NAME writes one here.")
        return 0
    name = options.name.removesuffix(".py")
    if name not in known:
        raise errors.ExperimentError(
            f"{options.name!r} is not an example.{errors.did_you_mean(options.name, list(known))} "
            f"The examples are {', '.join(known)}; plurax examples says what each is."
        )
    text = known[name].read_text("utf-8")
    beside = [stem for stem in re.findall(r'with_name\("(\w+)\.py"\)', text) if stem in known]
    target = local_path(options.to)
    for stem in [name, *beside]:
        _write(target / f"{stem}.py", known[stem].read_text("utf-8"))
        print(f"wrote {target / stem}.py")
    if missing := missing_packages(text):
        print(f"It needs {', '.join(missing)}: pip install 'plurax[examples,pictures]'")
    starts = "plurax train" if "def experiment(" in text else "python"
    print(f"\n  {starts} {shlex.quote(f'{target / name}.py')}")
    return 0


def examples_folder() -> Path:
    """Return where the examples are: in the package, or beside its source."""
    package = Path(plurax.__file__).parent
    shipped = package / "examples"
    return shipped if shipped.is_dir() else package.parents[1] / "examples"


def examples() -> dict[str, Path]:
    """Return the examples by name, without the template."""
    paths = sorted(examples_folder().glob("*.py"))
    return {path.stem: path for path in paths if path.stem != TEMPLATE}


def missing_packages(text: str) -> list[str]:
    """Return what a file imports at its top and is not installed."""
    names = set[str]()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


def _first_line(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").partition("\n")[0]


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:  # of the file, or of one where a folder should be
        raise errors.ExperimentError(
            f"{error.filename} is there already, and is not written over. Give another name or "
            "folder, or move it away."
        ) from None
    except OSError as error:
        raise errors.not_written(str(path), str(error)) from None
