"""Define the options of the commands; the fields' docstrings are their help."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from plurax.experiment import Experiment
from plurax.guards.rollback import Rollback
from plurax.members import Members
from plurax.plan import Plan
from plurax.resample import Everything, Resample, bootstrap, kfold
from plurax.server.servers import Servers
from plurax.train.fit import fit

T = TypeVar("T")

Devices = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="N|cores",
        help="Use N virtual CPU devices, or one per core, whatever hardware there is.",
    ),
]


@dataclasses.dataclass(frozen=True)
class PopulationOptions:
    """Many networks in one program; the other fields of the file's members stay."""

    seeds: int | None
    """Number of members, with the seeds 0, 1, 2, ...; None: as in the file."""
    resample: Literal["file", "none", "bootstrap", "kfold"] = "file"
    """Rows each member trains on: as in the file, all, a bootstrap sample, all but a fold."""
    folds: int = 5
    """Number of folds of kfold."""

    def __post_init__(self) -> None:
        kfold(self.folds)  # raises for an invalid number of folds, used or not

    def chosen(self, members: Members | None) -> Members | None:
        """Return the file's members with the options applied; None for one network."""
        if self.seeds is None and self.resample == "file":
            return members
        members = members or Members(self.seeds)
        resample: dict[str, Callable[[], Resample]] = {
            "file": lambda: members.resample,
            "none": Everything,
            "bootstrap": bootstrap,
            "kfold": lambda: kfold(self.folds),
        }
        seeds = members.seeds if self.seeds is None else self.seeds
        return dataclasses.replace(members, seeds=seeds, resample=resample[self.resample]())


@dataclasses.dataclass(frozen=True)
class Common:
    """Options of every command."""

    plan: Plan
    """How training is distributed over devices."""
    plan_file: Path | None
    """Read the plan from this TOML file instead."""
    devices: Devices
    members: PopulationOptions
    """Many networks in one program."""
    batch_size: int | None
    """Examples per step."""
    experiment: Any
    """Arguments of the file's own experiment(...)."""

    def chosen_plan(self) -> Plan:
        """Return the plan from `plan_file`, if given, else from the options."""
        return Plan.load(self.plan_file) if self.plan_file else self.plan


def chosen_servers(options: Any, servers: Servers | None) -> Servers | None:
    """Return the file's servers with the fields that the command line gives; None without both."""
    fields = _given(options)
    return dataclasses.replace(servers or Servers(), **fields) if fields else servers


def chosen_rollback(options: Any, rollback: Rollback) -> Rollback:
    """Return the file's rollback with the fields that the command line gives."""
    return dataclasses.replace(rollback, **_given(options))


def _given(options: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if value is not None}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Common):
    """Train the experiment, with checkpoints, metrics and curves in the output directory."""

    machine: Annotated[str | None, tyro.conf.arg(metavar="PRESET|FILE")] = None
    """Estimate a step on published hardware, like 8xA100-80GB, or on the machine of a TOML file,
    and show and log what was predicted beside what is measured. None: as in the file."""
    nodes: int = 1
    """Number of nodes of the published hardware."""


NO_OPTIONS = frozenset(
    ("task", "optimizer", "data", "evaluation", "plan", "members", "machine", "servers", "rollback",
     "devices", "compiler_options", "command", "local_batches", "callbacks")
)  # fmt: skip
"""Arguments of `fit` that are values of Python, or that the options have in another form."""


def fit_options() -> dict[str, Any]:
    """Return the other arguments of `fit`: their types and, as help, the words of its docstring.

    An argument that `fit` gets is an option of `plurax train` without another line.
    """
    signature = inspect.signature(fit, eval_str=True)
    kinds = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    kinds["output"] = Path  # the command always writes
    texts = argument_texts(fit)
    return {
        name: Annotated[kind, tyro.conf.arg(help=texts[name])]
        for name, kind in kinds.items()
        if name not in NO_OPTIONS
    }


def options_of(kind: type, doc: str) -> Any:
    """Return options that are the fields of a dataclass, None where they are not given."""
    texts = argument_texts(kind)
    fields: list[Any] = [
        (name, Annotated[hint | None, tyro.conf.arg(help=texts[name])], None)
        for name, hint in get_type_hints(kind).items()
    ]
    options = dataclasses.make_dataclass(f"{kind.__name__}Options", fields, frozen=True)
    options.__doc__ = doc
    return options


def argument_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a docstring says of each argument, in lines like "- `name`: text"."""
    items = re.findall(
        r"^- `(\w+)`: (.*?)(?=^- `|\n\n)", inspect.getdoc(function) or "", re.MULTILINE | re.DOTALL
    )
    texts = {name: " ".join(text.split()) for name, text in items}
    return {name: text[0].upper() + text[1:] for name, text in texts.items()}


def train_class() -> type[Train]:
    """Return the options of `plurax train`, those that are arguments of `fit` included."""
    servers = options_of(
        Servers, "Workers that compute gradients, and servers that hold the parameters."
    )
    rollback = options_of(Rollback, "When bad steps roll the run back to a checkpoint before them.")
    fields: list[Any] = [
        *fit_options().items(),
        ("servers", servers, servers()),
        ("rollback", rollback, rollback()),
    ]
    options = dataclasses.make_dataclass("Train", fields, bases=(Train,), frozen=True, kw_only=True)
    options.__doc__ = Train.__doc__
    return options


@dataclasses.dataclass(frozen=True)
class Show(Common):
    """Show a plan on a machine: shards, memory per device, communication of the compiled step.

    For a pipeline, also its timeline. With --search, find the fastest plan that fits: what the
    command line says of the plan holds, and the rest is searched.

    `plurax plan a.toml b.toml --diff FILE` says what differs between two plans, and what it costs.
    """

    search: bool = False
    """Rank the fastest plans for --machine; nothing is compiled."""
    longest: bool = False
    """Say how long the sequences of a batch may be on --machine, under the plan or, with --search,
    under any: dim 1 of the data is made longer, and nothing is compiled."""
    machine: Annotated[str | None, tyro.conf.arg(metavar="PRESET|FILE")] = None
    """Show a step's estimate on published hardware, like 8xA100-80GB, or on the machine of a TOML
    file, beside what is compiled. With --search, the machine to find a plan for; None: this one,
    measured."""
    nodes: int = 1
    """Nodes of the preset."""
    memory: str | None = None
    """With --search, what a device may hold, such as 40GB; None: all its memory."""
    evaluations: int | None = None
    """With --search, how many plans it traces at the most: more find better plans for large
    machines, and take longer."""
    seconds: float | None = None
    """With --search, the time after which it stops with what it has found; None: no limit."""
    save: Path | None = None
    """Draw memory, communication and timelines to this PNG, too. With --search, write the best plan
    to this TOML file, for --plan-file."""
    output: Path | None = None
    """With --search, draw what was found into this directory: search.png, and layer.png if the best
    plan splits over `tensor`."""
    tune: Path | None = None
    """Measure members' chunk and batch_dim by short runs, and write the plan to this TOML file, for
    --plan-file."""
    compare: bool = False
    """Compile a pipeline under every named schedule, and show them side by side."""
    compile_for: Annotated[str | None, tyro.conf.arg(metavar="MACHINE")] = None
    """Compile for devices that are not here, such as v5p:2x2x4 or 8xH100-80GB, and show what their
    compiler makes of the plan; with --search, of the three fastest. Needs plurax[tpu] or
    plurax[cuda]."""


def default_options(kind: type[T], file: Path, experiment: Experiment, own: object = None) -> T:
    """Return the options of a command, as an experiment file has them.

    `own` has the arguments of its `experiment(...)`; None for those of no file.
    """
    seeds = None if experiment.members is None else experiment.members.seeds
    values = {
        **vars(experiment),
        "plan_file": None,
        "devices": None,
        "members": PopulationOptions(seeds if isinstance(seeds, int) else None),
        "output": Path("runs") / file.stem,
        "inputs": tyro.MISSING,
        "experiment": own,
    }
    if issubclass(kind, Train) and experiment.output is not None:
        values["output"] = Path(experiment.output)
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    without = [f.name for f in fields if {f.default, f.default_factory} == {dataclasses.MISSING}]
    return kind(**{name: values[name] for name in without})
