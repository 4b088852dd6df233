"""Parse options, shown in groups, each with its help in one piece.

tyro shows a nested dataclass as a group of its own, and keeps the line breaks of docstrings in the
source. So what is parsed is a copy of the options:

    Train(epochs, batch_size, plan, ...)              flat, with docstrings in the source
    Train(data=Data(batch_size, ...),                 groups, whose names are no prefixes
          training=Training(epochs, ...), plan=Plan(...))

and what comes out is flat again.

`--help` shows of many options those that are needed most, each with the first sentence of its
help, so that they fit on a screen; `--help-all` shows all.
"""

import ast
import contextlib
import dataclasses
import functools
import inspect
import io
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

from plurax import errors

T = TypeVar("T")


_REQUIRED = dataclasses.MISSING
"""Of an option without a default."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Options that are shown together, under `name` and a sentence."""

    name: str
    text: str
    options: tuple[str, ...]


GROUPS = (
    Group("data", "What is read, and in which order.",
          ("batch_size", "shuffle", "ragged", "inputs", "predictions", "chunk", "best")),
    Group("training", "How long, and from which seed.",
          ("epochs", "max_steps", "max_seconds", "fast_dev_run", "steps", "seed", "resident")),
    Group("device", "Where it runs, or is estimated to run.",
          ("devices", "plan_file", "machine", "nodes")),
    Group("output and checkpoint", "What is written, and where it goes on.",
          ("output", "resume", "restart", "report_every", "evaluate_every", "checkpoint_every",
           "check_replicas_every", "progress", "save")),
    Group("search", "Which plans are compared, and for how long.",
          ("search", "memory", "solver", "seconds", "tune", "compare")),
)  # fmt: skip
"""In the order of the help. An option that none of them names is shown before them."""

HELP = ("-h", "--help", "--help-all")

NEEDED_MOST = (
    "epochs", "batch_size", "seed", "output", "resume", "restart", "inputs", "predictions", "steps",
    "search", "save", "devices", "machine", "plan.data", "plan.microbatches", "plan.zero",
    "members.seeds",
)  # fmt: skip
"""What `--help` shows of the options of a command with FILE, in this order."""


def parse_options(kind: type[T], prog: str, arguments: Sequence[str], default: Any = None) -> T:
    """Return options of a kind, parsed by tyro.

    **Arguments:**

    - `kind`: a dataclass; the docstrings of its fields are the help.
    - `prog`: the command, as the help shows it.
    - `arguments`: the command line.
    - `default`: an instance with the defaults; None for those of the fields.
    """
    whole = "--help-all" in arguments
    short = default is not None and not whole and bool({*HELP} & {*arguments})
    description = inspect.cleandoc(kind.__doc__ or "")
    if short:
        description = description.split("\n\n")[0] + " --help-all shows all options."
        parse_by_tyro(_needed_most(default), ["--help"], prog=prog, description=description)
    copied, instance, fixed = _grouped(kind, default)
    options = {"prog": prog, "description": description, "config": (tyro.conf.SuppressFixed,)}
    options |= {} if instance is None else {"default": instance}
    parsed = parse_by_tyro(copied, ["--help"] if whole else arguments, **options)
    values = dict(fixed)
    names = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in vars(parsed).items():
        values |= {name: value} if name in names else vars(value)
    for name, value in values.items():
        own: Any = type(getattr(default, name, None))
        if hasattr(own, "__dataclass_fields__") and not isinstance(value, own):
            values[name] = own(**vars(value))
    create: Any = kind
    return create(**values)


def parse_by_tyro(kind: type, arguments: Sequence[str], **options: Any) -> Any:
    """Return an instance of a dataclass, of the arguments.

    Raises `ExperimentError` with what tyro says of arguments that it refuses, without its frame.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parsed = tyro.cli(kind, args=list(arguments), **options)
    except SystemExit as stopped:
        if not stopped.code:
            raise
        # A title, then the text, in a frame where the terminal has the signs for it.
        lines = [line.strip("│").rstrip() for line in said.getvalue().splitlines()[1:]]
        text = textwrap.dedent("\n".join(line for line in lines if re.search(r"\w", line)))
        raise errors.ExperimentError(text.removeprefix("Error parsing ")) from None
    sys.stderr.write(said.getvalue())
    return parsed


def without_breaks(kind: type) -> type:
    """Return a copy of a dataclass for tyro, with the help of each field on one line."""
    return _grouped(kind, None)[0]


def _needed_most(default: Any) -> type:
    """Return a dataclass of the options that `--help` shows, each with one sentence of help."""
    own = dataclasses.fields(default.experiment) if hasattr(default, "experiment") else ()
    columns = []
    for path in (*NEEDED_MOST, *(f"experiment.{field.name}" for field in own)):
        group, _, name = path.rpartition(".")
        owner = getattr(default, group, None) if group else default
        groups = get_type_hints(type(default), include_extras=True)
        if not hasattr(owner, name) or tyro.conf.Fixed in get_args(groups.get(group)):
            continue
        hint = get_type_hints(type(owner), include_extras=True)[name]
        base, *marks = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        mark: Any = next((mark for mark in marks if hasattr(mark, "help")), tyro.conf.arg())
        text = mark.help or field_texts(type(owner)).get(name) or ""
        sentence = re.split(r"(?<=\.)\s|[;:]", text)[0]
        mark = dataclasses.replace(mark, name=path, help=sentence or None)
        columns.append((path.replace(".", "_"), Annotated[base, mark], getattr(owner, name)))
    return _dataclass("Needed", columns, None)


def _grouped(kind: type, default: Any) -> tuple[type, Any, dict[str, Any]]:
    """Return the copy with its defaults, and the values that no option changes."""
    columns, fixed = _columns(kind, default)
    groups: list[tuple[str, Group, list[Any]]] = []
    for group in GROUPS if default is not None else ():
        own = [columns.pop(name) for name in group.options if name in columns]
        if own:
            # No option is named like that.
            groups.append((f"group of {group.name}".replace(" ", "_"), group, own))
    # Nested dataclasses come last, as groups of their own.
    nested = [name for name, one in columns.items() if dataclasses.is_dataclass(one[2])]
    plain = [one for name, one in columns.items() if name not in nested]
    fields, values = [*plain], {one[0]: one[2] for one in plain}
    for name, group, own in groups:
        made = _dataclass(name, own, group.text)
        label = tyro.conf.arg(name=group.name)
        fields.append((name, Annotated[made, tyro.conf.OmitArgPrefixes, label], None))
        values[name] = made(**{one[0]: one[2] for one in own})
    for name in nested:
        fields.append(columns[name])
        values[name] = columns[name][2]
    copied = _dataclass(kind.__name__, fields, kind.__doc__)
    return copied, copied(**values) if default is not None else None, fixed


def _columns(kind: type, default: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return name, type and default of each option, and the values that no option changes."""
    columns: dict[str, Any] = {}
    fixed: dict[str, Any] = {}
    hints, texts = get_type_hints(kind, include_extras=True), field_texts(kind)
    for field in dataclasses.fields(kind):
        name, hint = field.name, hints[field.name]
        if default is None:
            own = _default_of(field)
            if isinstance(hint, type) and dataclasses.is_dataclass(hint) and own is _REQUIRED:
                hint = without_breaks(hint)
            columns[name] = (name, _with_help(hint, texts.get(name)), own)
            continue
        value = getattr(default, name)
        if tyro.conf.Fixed in get_args(hint):
            fixed[name] = value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner, _ = _columns(type(value), value)
            made = _dataclass(type(value).__name__, inner.values(), type(value).__doc__)
            text = texts.get(name) or inspect.cleandoc(type(value).__doc__ or "")
            own = made(**{one[0]: one[2] for one in inner.values()})
            columns[name] = (name, Annotated[made, tyro.conf.arg(help=text)], own)
        else:
            columns[name] = (name, _with_help(hint, texts.get(name)), value)
    return columns, fixed


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _same(value: T) -> T:
    return value


def _dataclass(name: str, columns: Any, text: str | None) -> type:
    """Return a dataclass of these columns; those without a default are required."""
    fields: list[Any] = [(one[0], one[1]) for one in columns if one[2] is _REQUIRED]
    fields += [
        (one[0], one[1], dataclasses.field(default_factory=functools.partial(_same, one[2])))
        for one in columns
        if one[2] is not _REQUIRED
    ]
    made = dataclasses.make_dataclass(name, fields, frozen=True)
    made.__doc__ = inspect.cleandoc(text or "")
    return made


def _with_help(hint: Any, text: str | None) -> Any:
    """Return a type with a help text, unless it has one."""
    if text is None:
        return hint
    base, *marks = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    own = [mark for mark in marks if hasattr(mark, "help")]
    if not own:
        return Annotated[(base, *marks, tyro.conf.arg(help=text))]
    marks = [
        dataclasses.replace(mark, help=mark.help or text) if mark in own else mark for mark in marks
    ]
    return Annotated[(base, *marks)]


def field_texts(kind: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, on one line."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, ValueError, SyntaxError):  # built in, or made by a function
            continue
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                texts[field.target.id] = " ".join(str(after.value.value).split())
    return texts
