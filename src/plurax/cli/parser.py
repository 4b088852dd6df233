"""Parse the options of a command with tyro.

tyro reads a dataclass: a field is an option, its docstring the help. A rule of ours for how it
does so (`tyro.constructors`) changes what the help shows, and not the dataclass:

- The help of a field is one piece. (tyro keeps a line break of the source before a backtick.)
- The options of a command with FILE stand in groups, although its dataclass is flat:

      Train(epochs, batch_size, seed, plan=Plan(data, ...), ...)

      data options:      --batch-size
      training options:  --epochs, --seed
      plan options:      --plan.data, ...

- Of such a command, `--help` shows the options that are needed most, each with the first sentence
  of its help, so that they fit on a screen; `--help-all` shows all.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import (
    MISSING_NONPROP,
    ConstructorRegistry,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from plurax import errors

T = TypeVar("T")


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
          ("search", "longest", "memory", "evaluations", "seconds", "tune", "compare")),
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
    """Return options of a kind.

    **Arguments:**

    - `kind`: a dataclass; the docstrings of its fields are the help.
    - `prog`: the command, as the help shows it.
    - `arguments`: the command line.
    - `default`: of a command with FILE, an instance with the defaults, whose options are shown in
      groups. None for the defaults of the fields.
    """
    description = inspect.cleandoc(kind.__doc__ or "")
    asked = {*HELP} & {*arguments}
    shown = None if default is None else _in_groups(default)
    if default is not None and asked and "--help-all" not in asked:
        shown = _needed_most(default)
        description = description.split("\n\n")[0] + " --help-all shows all options."
    options = {"prog": prog, "description": description}
    return run_tyro(kind, ["--help"] if asked else arguments, shown=shown, **options)


def run_tyro(
    kind: type, arguments: Sequence[str], shown: StructConstructorSpec | None = None, **options: Any
) -> Any:
    """Return an instance of a dataclass, of the arguments.

    `shown`, if given, is how tyro shows it. Raises `ExperimentError` with what tyro says of
    arguments that it refuses, without its frame.
    """
    rules, printed = option_rules(), io.StringIO()
    if shown is not None:
        rules.struct_rule(lambda info: shown if info.type is kind else None)
    try:
        with contextlib.redirect_stderr(printed):
            parsed = tyro.cli(kind, args=list(arguments), registry=rules,
                              config=(tyro.conf.SuppressFixed,), **options)  # fmt: skip
    except SystemExit as stopped:
        if not stopped.code:
            raise
        # A title, then the text, in a frame where the terminal has the signs for it.
        lines = [line.strip("│").rstrip() for line in printed.getvalue().splitlines()[1:]]
        text = textwrap.dedent("\n".join(line for line in lines if re.search(r"\w", line)))
        raise errors.ExperimentError(text.removeprefix("Error parsing ")) from None
    sys.stderr.write(printed.getvalue())
    return _created(parsed)


def _created(parsed: Any) -> Any:
    """Return what tyro has parsed, with the dataclasses created.

    Only now, so that an error that one raises is not shown as tyro shows its own.
    """
    if not isinstance(parsed, functools.partial):
        return parsed
    return parsed.func(**{name: _created(value) for name, value in parsed.keywords.items()})


# --- How tyro reads and shows options -------------------------------------------------------------


class Section:
    """A group of options, as a type of tyro's. A subclass has the options as `spec`."""

    spec: ClassVar[StructConstructorSpec]


def option_rules() -> ConstructorRegistry:
    """Return the rules by which tyro reads dataclasses and sections."""
    rules = ConstructorRegistry()

    @rules.struct_rule
    def read(info: StructTypeInfo) -> StructConstructorSpec | None:
        if isinstance(info.type, type) and issubclass(info.type, Section):
            return info.type.spec
        generic = getattr(info.type, "__parameters__", ())  # tyro knows what stands for them
        if not dataclasses.is_dataclass(info.type) or generic:
            return None
        return _spec(info.type, info.default if isinstance(info.default, info.type) else None)

    return rules


def _spec(kind: type, default: Any) -> StructConstructorSpec:
    """Return the fields of a dataclass, each with its help on one line.

    A field of `tyro.conf.Fixed` has its default and no option, and so has one of type `Any` whose
    value is no dataclass.
    """
    hints, texts = get_type_hints(kind, include_extras=True), field_texts(kind)
    fields, fixed = [], {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        value = _default_of(field) if default is None else getattr(default, field.name)
        nested = type(value) if dataclasses.is_dataclass(value) else hint
        if tyro.conf.Fixed in get_args(hint) or nested is Any:
            fixed[field.name] = value
            continue
        text = texts.get(field.name)
        if text is None and dataclasses.is_dataclass(nested):
            text = inspect.cleandoc(nested.__doc__ or "")
        fields.append(StructFieldSpec(field.name, hint, value, text))

    def create_later(**values: Any) -> Any:
        return functools.partial(kind, **fixed, **values)

    create_later.__doc__ = kind.__doc__
    return StructConstructorSpec(create_later, tuple(fields))


def _in_groups(default: Any) -> StructConstructorSpec:
    """Return the options of a command with FILE in groups; nested dataclasses are the last ones."""
    flat = _spec(type(default), default)
    nested = [field for field in flat.fields if dataclasses.is_dataclass(field.default)]
    nested.sort(key=lambda field: field.name == "experiment")
    ungrouped = {field.name: field for field in flat.fields if field not in nested}
    sections: list[StructFieldSpec] = []
    for group in GROUPS:
        own = tuple(ungrouped.pop(name) for name in group.options if name in ungrouped)
        if own:
            spec = StructConstructorSpec(lambda **values: values, own)
            section: Any = type(group.name, (Section,), {"spec": spec})
            label = tyro.conf.arg(name=group.name)
            shown: Any = Annotated[section, tyro.conf.OmitArgPrefixes, label]
            name = f"section {len(sections)}"  # no option is named like that
            sections.append(StructFieldSpec(name, shown, MISSING_NONPROP, group.text))

    def create_later(**values: Any) -> Any:
        for section in sections:
            values |= values.pop(section.name)
        return flat.instantiate(**values)

    return StructConstructorSpec(create_later, (*ungrouped.values(), *sections, *nested))


def _needed_most(default: Any) -> StructConstructorSpec:
    """Return the options that `--help` shows, each with one sentence of help."""
    fields = {field.name: field for field in _spec(type(default), default).fields}
    for name, field in list(fields.items()):
        if dataclasses.is_dataclass(field.default):
            inner = _spec(type(field.default), field.default).fields
            fields |= {f"{name}.{nested.name}": nested for nested in inner}
    shown = []
    for path in (*NEEDED_MOST, *(path for path in fields if path.startswith("experiment."))):
        if path in fields:
            field = fields[path]
            marks = getattr(field.type, "__metadata__", ())
            text = next((mark.help for mark in marks if hasattr(mark, "help")), None)
            sentence = re.split(r"(?<=\.)\s|[;:]", text or str(field.helptext or ""))[0]
            kind: Any = Annotated[field.type, tyro.conf.arg(name=path, help=sentence or None)]
            shown.append(dataclasses.replace(field, name=path.replace(".", "_"), helptext=None,
                                             type=kind))  # fmt: skip
    return StructConstructorSpec(type(default), tuple(shown))


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING_NONPROP if field.default is dataclasses.MISSING else field.default


@functools.lru_cache(maxsize=64)  # it parses source code, and an option is read more than once
def field_texts(kind: type) -> Mapping[str, str]:
    """Return the docstring of each field of a dataclass, on one line."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        with contextlib.suppress(OSError, TypeError):  # built in, or made by a function
            fields = docstring_parser.parse_from_object(base).params
            texts |= {field.arg_name: " ".join((field.description or "").split())
                      for field in fields}  # fmt: skip
    return MappingProxyType(texts)
