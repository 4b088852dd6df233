"""The command line: parse, call, print."""

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console

from plurax import __version__, errors, experiment, tree
from plurax.checkpoint import Checkpoints
from plurax.data import Ragged, as_data
from plurax.execute.program import Program
from plurax.log import read_rows
from plurax.mesh import make_mesh, virtual_devices
from plurax.plan import Plan
from plurax.report.curves import draw_curves
from plurax.report.tables import plan_report
from plurax.train import fit

HELP = f"""plurax {__version__}: train neural networks in parallel on JAX

  plurax train FILE      train the experiment that FILE defines
  plurax predict FILE    run its trained network over inputs of any number
  plurax plan FILE       show what a plan does on a machine, before anything runs

FILE is a Python file that defines experiment(), which returns plurax.Experiment(...).
Plan, epochs, batch size, seed and more can be overridden:

  plurax train examples/digits.py --epochs 3 --plan.data 4 --devices 4

plurax COMMAND FILE --help lists all options with the file's own defaults.
"""

Devices = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="N|cores",
        help="Use N virtual CPU devices, or one per core, whatever hardware there is.",
    ),
]


@dataclasses.dataclass(frozen=True)
class Common:
    """Options of every command."""

    plan: Plan
    """How training is spread over devices."""
    plan_file: Path | None
    """Read the plan from this TOML file instead."""
    devices: Devices
    batch_size: int | None
    """Examples of a step."""

    def chosen_plan(self) -> Plan:
        """The plan from the file, if one was named, else from the options."""
        return Plan.load(self.plan_file) if self.plan_file else self.plan


@dataclasses.dataclass(frozen=True)
class Train(Common):
    """Train the experiment, with checkpoints, metrics and curves in the output directory."""

    epochs: int
    """Passes over the data."""
    seed: int
    """Of initialisation, dropout and order."""
    ragged: Ragged
    """What to do with a smaller last batch."""
    checkpoint_every: int | None
    """Steps between checkpoints, besides those after each epoch."""
    output: Path
    """Where checkpoints, metrics, curves and the plan go."""
    resume: bool = False
    """Go on from the newest checkpoint in the output directory."""
    progress: bool = True
    """Show progress."""


@dataclasses.dataclass(frozen=True)
class Predict(Common):
    """Run the trained network over inputs from a file, whatever their number."""

    output: Path
    """The directory a training run wrote."""
    inputs: Path
    """A .npy file (one array), or .npz (a dict of arrays), with the inputs in the leading dim."""
    predictions: Path = Path("predictions.npy")
    """Where the outputs go: .npy for one array, .npz for a dict of arrays."""
    chunk: int | None = None
    """Inputs at a time; default the batch size."""


@dataclasses.dataclass(frozen=True)
class Show(Common):
    """Show a plan on a machine: mesh, memory per device, communication of the compiled step."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `plurax`. Exits with 2 after a user's error."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "predict": _predict,
        "plan": _plan,
    }
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        raise SystemExit(0)
    if arguments[0] == "--version":
        print(f"plurax {__version__}")
        raise SystemExit(0)
    command = commands.get(arguments[0])
    if command is None:
        print(f"error: {errors.unknown_command(arguments[0], commands)}", file=sys.stderr)
        raise SystemExit(2)
    try:
        raise SystemExit(command(arguments[1:]))
    except errors.PluraxError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _train(arguments: list[str]) -> int:
    made, options = _parse(arguments, "train", _train_options)
    console = Console(highlight=False, soft_wrap=True)
    plan = options.chosen_plan()
    console.print(plan.explain(options.batch_size), markup=False)
    result = fit(
        made.task,
        made.optimizer,
        made.data,
        plan=plan,
        epochs=options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
        evaluation=made.evaluation,
        shuffle=made.shuffle,
        ragged=options.ragged,
        output=options.output,
        resume=options.resume,
        checkpoint_every=options.checkpoint_every,
        progress=options.progress,
    )
    rows = list(read_rows(options.output / "metrics.jsonl"))
    if any(row["kind"] == "epoch" for row in rows):
        draw_curves(rows, options.output / "curves.png", title=Path(arguments[0]).stem)
    console.print(
        f"wrote {options.output}: curves.png, metrics.jsonl, tensorboard/, checkpoints/, plan.toml",
        markup=False,
    )
    return {None: 0, "SIGINT": 130, "SIGTERM": 143}[result.interrupted]


def _predict(arguments: list[str]) -> int:
    made, options = _parse(arguments, "predict", _predict_options)
    program = _program(made, options)
    directory = options.output / "checkpoints"
    if not directory.is_dir():
        raise errors.checkpoint_none(str(options.output))
    with Checkpoints(directory) as checkpoints:
        restored = checkpoints.restore(program.state_shapes)
    if restored is None:
        raise errors.checkpoint_none(str(options.output))
    outputs = program.predict(restored[0], _read_arrays(options.inputs), chunk=options.chunk)
    path = _write_arrays(options.predictions, outputs)
    print(f"wrote {path}:\n{tree.describe(outputs)}")
    return 0


def _plan(arguments: list[str]) -> int:
    made, options = _parse(arguments, "plan", _show_options)
    program = _program(made, options)
    params = program.state_shapes.params
    report = plan_report(
        program.plan,
        program.batch_size,
        [str(device) for device in program.mesh.devices.flat],
        tree.parameter_count(params),
        tree.byte_count(params),
        program.memory(),
        program.collectives(),
    )
    Console(highlight=False, soft_wrap=True).print(report)
    return 0


# --- Options, with the experiment's own values as defaults ------------------------------------


def _train_options(file: Path, made: experiment.Experiment) -> Train:
    return Train(
        **_common(made),
        epochs=made.epochs,
        seed=made.seed,
        ragged=made.ragged,
        checkpoint_every=made.checkpoint_every,
        output=Path("runs") / file.stem,
    )


def _predict_options(file: Path, made: experiment.Experiment) -> Predict:
    return Predict(**_common(made), output=Path("runs") / file.stem, inputs=tyro.MISSING)


def _show_options(_file: Path, made: experiment.Experiment) -> Show:
    return Show(**_common(made))


def _common(made: experiment.Experiment) -> dict[str, Any]:
    return {
        "plan": made.plan,
        "plan_file": None,
        "devices": None,
        "batch_size": made.batch_size,
    }


def _parse(
    arguments: list[str],
    command: str,
    defaults: Callable[[Path, experiment.Experiment], Any],
) -> tuple[experiment.Experiment, Any]:
    """The experiment of the file, and the options with its values as defaults.

    Devices come first, because importing the file may start JAX; then the arguments of the file's
    own `experiment(...)`, given as `--experiment.NAME`; then everything, with `--help`.
    """
    program = f"plurax {command} FILE"
    if not arguments or arguments[0].startswith("-"):
        raise errors.no_experiment_file(command, asked_help=bool({"-h", "--help"} & {*arguments}))
    file, rest = Path(arguments[0]), arguments[1:]
    _start_devices(rest)
    function = experiment.load(file)
    own = _own_arguments(function)
    wrapped = dataclasses.make_dataclass("Own", [("experiment", own)], frozen=True)
    chosen: Any = tyro.cli(wrapped, prog=program, args=_only_own(rest))
    made = function(**dataclasses.asdict(chosen.experiment))
    default = defaults(file, made)
    # One level of options, so that --plan.data stays short.
    kind = type(default)
    with_own = dataclasses.make_dataclass(
        kind.__name__, [("experiment", own)], bases=(kind,), frozen=True, kw_only=True
    )
    values = {field.name: getattr(default, field.name) for field in dataclasses.fields(kind)}
    options = tyro.cli(
        with_own,
        prog=program,
        description=kind.__doc__,
        args=rest,
        default=with_own(**values, experiment=chosen.experiment),
    )
    return made, options


def _own_arguments(function: Callable[..., Any]) -> type:
    """A dataclass of the parameters of a file's `experiment(...)`."""
    fields = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        kind = str if parameter.annotation is parameter.empty else parameter.annotation
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((name, kind, *default))
    made = dataclasses.make_dataclass("Experiment", fields, frozen=True)
    made.__doc__ = "Arguments of the file's own experiment(...)."
    return made


def _only_own(arguments: list[str]) -> list[str]:
    """The arguments for the file's own `experiment(...)`, with their values."""
    kept, keep = [], False
    for argument in arguments:
        if argument.startswith("-"):
            keep = argument.startswith("--experiment.")
        if keep:
            kept.append(argument)
    return kept


def _start_devices(arguments: list[str]) -> None:
    """Obey `--devices` before anything else uses JAX."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == "--devices" and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith("--devices="):
            value = argument.removeprefix("--devices=")
    if value is None:
        return
    count = len(os.sched_getaffinity(0)) if value == "cores" else value
    try:
        count = int(count)
    except ValueError:
        raise errors.devices_not_understood(value) from None
    virtual_devices(count)


def _program(made: experiment.Experiment, options: Common) -> Program:
    plan = options.chosen_plan()
    _, like = as_data(
        made.data,
        batch_size=options.batch_size,
        seed=made.seed,
        shuffle=made.shuffle,
        ragged=made.ragged,
    )
    return Program(made.task, made.optimizer, plan, like, make_mesh(plan))


def _read_arrays(path: Path) -> Any:
    if not path.is_file():
        raise errors.inputs_not_found(str(path))
    try:
        loaded = np.load(path, allow_pickle=False)
        return loaded if path.suffix == ".npy" else dict(loaded)
    except (OSError, ValueError) as error:
        raise errors.inputs_not_arrays(str(path), str(error)) from None


def _write_arrays(path: Path, outputs: Any) -> Path:
    if isinstance(outputs, np.ndarray):
        path = path.with_suffix(".npy")
        np.save(path, outputs, allow_pickle=False)
    else:
        path = path.with_suffix(".npz")
        np.savez(path, **tree.named_leaves(outputs))
    return path


if __name__ == "__main__":
    main()
