"""The command line: parse, call, print."""

import contextlib
import dataclasses
import itertools
import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from rich.console import Console

from plurax import __version__, errors, experiment, tree
from plurax.analysis.comparison import Comparison
from plurax.analysis.estimate import Estimate, estimate, human_seconds
from plurax.analysis.liveness import peak_bytes
from plurax.analysis.measured import Measured
from plurax.analysis.plan_ahead import trace_plan
from plurax.analysis.verify import verify
from plurax.cli.arguments import bytes_of, value
from plurax.cli.launch_command import launch_command
from plurax.cli.machine_command import machine_command, machine_named
from plurax.cli.options import Common, DiffOptions, EstimateOptions, Show
from plurax.cli.parse import (
    diff_options,
    estimate_options,
    parse,
    predict_options,
    show_options,
    verify_options,
)
from plurax.cli.replay_command import replay_command
from plurax.cli.report_command import report_command
from plurax.cli.train_command import train_experiment
from plurax.distributed.environment import writes_files
from plurax.distributed.global_arrays import described_devices
from plurax.distributed.initialize import exit_code, leave
from plurax.execute.placement import chunks, leading_dim
from plurax.execute.program import Program
from plurax.exit_codes import ExitCode
from plurax.machine import Machine
from plurax.members import Members
from plurax.pipeline.schedule import make_schedule
from plurax.plan import Plan, ScheduleName
from plurax.planner.search import search
from plurax.report.layer_picture import draw_found
from plurax.report.picture import check_matplotlib
from plurax.report.plan_picture import draw_plan
from plurax.report.shards import compared_table, shards_table
from plurax.report.tables import plan_report
from plurax.report.timeline import Costs, compared_schedules_table, timeline_report
from plurax.task import Task
from plurax.train.checkpoint import Checkpoints
from plurax.train.data import Data, as_data
from plurax.train.restore import make_program, restore, with_resampling
from plurax.train.tune import tune
from plurax.user_frames import describe_error, is_users
from plurax.validate import local_path

T = TypeVar("T")

HELP = f"""plurax {__version__}: train neural networks in parallel on JAX

  plurax train FILE      train the experiment that FILE defines
  plurax predict FILE    run its trained network over inputs of any number
  plurax plan FILE       show what a plan does on a machine, before anything runs
  plurax estimate FILE   say how long a step takes on a machine, and what it holds and sends
  plurax verify FILE     check that a plan computes what one device computes
  plurax machine         print a machine's rates, memory and links: this one's, or published ones
  plurax replay RUN      repeat a run with parameter servers from its record, and compare
  plurax report RUN ...  write runs as one HTML page: curves, sweeps, plans, estimates, events
  plurax launch -- ...   train by several processes, and again after a fault

FILE is a Python file that defines experiment(), which returns plurax.Experiment(...).
Plan, epochs, batch size, seed and more can be overridden:

  plurax train examples/digits.py --epochs 3 --plan.data 4 --devices 4

plurax COMMAND FILE --help lists all options with the file's own defaults.
"""


TABLE_WIDTH, TIMELINE_WIDTH = 160, 100


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `plurax`. Exits with 2 after a user's error."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": train_experiment,
        "predict": _predict,
        "plan": _plan,
        "estimate": _estimate,
        "verify": _verify,
        "machine": machine_command,
        "replay": replay_command,
        "report": report_command,
        "launch": launch_command,
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
        with _quiet_unless_first():
            raise SystemExit(command(arguments[1:]))
    except BrokenPipeError:  # the reader has closed the pipe, as with `| head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except KeyboardInterrupt:
        print("\nSIGINT: stopped before the first step; nothing was trained.", file=sys.stderr)
        raise SystemExit(130) from None
    except errors.PluraxError as error:
        print(f"error: {describe_error(error)}", file=sys.stderr)
        leave(exit_code(error))
    except Exception as error:
        code = exit_code(error)
        if code == ExitCode.OUT_OF_MEMORY:
            print(f"error: {errors.memory_is_full(str(error) or repr(error))}", file=sys.stderr)
            leave(code)
        if not is_users(error) or code == ExitCode.PEER_DIED:
            raise
        print(f"error: {errors.user_code_failed(describe_error(error))}", file=sys.stderr)
        leave(2)


@contextlib.contextmanager
def _quiet_unless_first() -> Iterator[None]:
    """Print to nowhere in all processes of a gang but the first; errors go to all their stderr."""
    if writes_files():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


def _predict(arguments: list[str]) -> int:
    made, options, _ = parse(arguments, "predict", predict_options)
    directory = local_path(options.output) / "checkpoints"
    if not directory.is_dir():
        raise errors.checkpoint_none(str(options.output))
    inputs = _read_arrays(options.inputs)
    program = _program(made, options, options.chosen_plan())
    with Checkpoints(directory) as checkpoints:
        restored = restore(program, checkpoints)
    if restored is None:
        raise errors.checkpoint_none(str(options.output))
    try:
        outputs = program.predict(restored[0], inputs, chunk=options.chunk)
    except Exception as error:
        if not is_users(error) or isinstance(error, errors.PluraxError):
            raise
        data = tree.describe(next(chunks(made.data, 1)), batch_dim=True)
        given = tree.describe(inputs)
        raise errors.predict_failed(
            describe_error(error), str(options.inputs), given, data
        ) from None
    outputs = jax.tree.map(_of_numpy, outputs)
    path = _written(options.predictions, lambda path: _write_arrays(path, outputs))
    print(f"wrote {path}:\n{tree.describe(outputs)}")
    return 0


def _plan(arguments: list[str]) -> int:
    started = time.perf_counter()
    if any(one.split("=")[0] == "--diff" for one in arguments):
        return _diff(arguments)
    made, options, _ = parse(arguments, "plan", show_options)
    plan = options.chosen_plan()
    if options.search:
        return _search(made, options, plan, arguments, started)
    _check_shown(options, plan)
    if options.tune is not None:
        plan = _tuned(made, options, plan, options.tune)
    predicted = _estimated(made, options, plan)
    program = _program(made, options, plan)
    params = program.canonical_shapes.params
    memory, found = program.memory(), program.collectives()
    console = Console(highlight=False, soft_wrap=True)
    columns = console.width if console.is_terminal else TIMELINE_WIDTH
    # A truncated table is useless; a wrapped line can still be read.
    console.width = max(console.width, TABLE_WIDTH)
    planned = program.planned_collectives() if program.members is None else []
    console.print(
        plan_report(
            program.plan,
            program.batch_size,
            described_devices(program.mesh.devices.flat),
            tree.parameter_count(params),
            tree.byte_count(params),
            memory,
            compared_table(planned, found) if planned else None,
            found,
            None if program.members else _predicted_peak(made, options, plan, predicted),
        )
    )
    if predicted is not None:
        beside = Measured.of(predicted, program.compiled, program.mesh)
        console.print(f"\n{beside}", markup=False)
    pipeline = _costs(program, plan) if plan.pipeline > 1 else None
    compared = None
    if pipeline is not None:
        console.print("", timeline_report(pipeline, columns))
    if pipeline is not None and options.compare:
        with console.status("compiling under the other schedules"):
            compared = _compared(made, options, plan, pipeline)
        console.print("", compared_schedules_table(compared, pipeline.schedule.name))
    if program.members is not None:
        return 0
    if planned:
        console.print("", shards_table(program.shardings))
    if options.save is not None:
        known = all(one.trips is not None for one in found)
        drawn = (program.shardings, memory, found if known or not planned else planned)
        title = f"{Path(arguments[0]).stem}, {plan.sizes_text()}"
        path = _with_ending(options.save)
        _written(
            path, lambda path: draw_plan(title, *drawn, path, pipeline, compared, plan.strategies)
        )
        console.print(f"wrote {path}", markup=False)
    return 0


def _check_shown(options: Show, plan: Plan) -> None:
    """Check the options with which a plan is shown, before anything is compiled."""
    for name in ("memory", "seconds", "output"):
        if getattr(options, name) is not None:
            raise errors.option_needs_search(name)
    if options.save is not None:
        check_matplotlib()
    if options.compare and plan.pipeline == 1:
        raise errors.compare_needs_pipeline()


def _with_ending(path: Path) -> Path:
    """Return the path of a picture; Matplotlib adds the same ending."""
    return path if path.suffix else path.with_name(f"{path.name}.png")


def _search(
    made: experiment.Experiment, options: Show, plan: Plan, arguments: list[str], started: float
) -> int:
    """Rank plans, and write the best one where asked."""
    if options.members.chosen(made.members) is not None or not isinstance(made.task, Task):
        raise errors.search_one_network()
    if options.output is not None:
        check_matplotlib()
    machine = machine_named(options.machine, options.nodes)
    _, batch = _source(made, options)
    spent = time.perf_counter() - started
    left = max(_COMMAND_SECONDS - spent, _LEAST_SECONDS)
    with Console(stderr=True).status("searching"):
        found = search(
            made.task,
            made.optimizer,
            batch,
            machine,
            pinned=plan if options.plan_file else _given(plan, arguments),
            memory=bytes_of(options.memory),
            solver=options.solver,
            seconds=left if options.seconds is None else options.seconds,
        )
    print(found)
    if options.save is not None:
        with Console(stderr=True).status("leaving out what the default does as well"):
            best = found.best
        _written(options.save, best.save)
        print(f"wrote {options.save}")
    if options.output is not None:
        for path in _written(options.output, lambda path: draw_found(found, path)):
            print(f"wrote {path}")
    return 0


_COMMAND_SECONDS = 7.5
"""Of the ten that `plurax plan --search` takes: starting Python and JAX takes the others."""
_LEAST_SECONDS = 4.0
"""Of a search: fewer than these leave no time for more than one estimate."""


def _given(plan: Plan, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the command line says of a plan, and the precision, which changes the numbers."""
    named = {one.removeprefix("--plan.").split("=")[0].replace("-", "_") for one in arguments}
    fields = [field.name for field in dataclasses.fields(Plan)]
    kept = [name for name in fields if name in named or name == "precision"]
    return {name: getattr(plan, name) for name in kept}


def _tuned(made: experiment.Experiment, options: Show, plan: Plan, path: Path) -> Plan:
    """Measure the open choices of a plan, write the plan to a file, and return it."""
    members = options.members.chosen(made.members)
    if members is None:
        raise errors.tune_needs_members()
    tuning = tune(**_trained(made, options, plan, members))
    print(tuning)  # print first: measuring may have taken minutes, and writing may fail
    _written(path, tuning.plan.save)
    print(f"wrote {path}")
    return tuning.plan


def _estimated(made: experiment.Experiment, options: Show, plan: Plan) -> Estimate | None:
    """Return the estimate of a plan on the machine that is named, if one is."""
    if options.machine is None and options.nodes == 1:
        return None
    task, machine, like = _to_estimate(made, options, "plan --machine")
    return estimate(task, made.optimizer, plan, like, machine)


def _predicted_peak(
    made: experiment.Experiment, options: Show, plan: Plan, predicted: Estimate | None
) -> int:
    if predicted is not None:
        return predicted.peak
    assert isinstance(made.task, Task)
    _, like = _source(made, options)
    return peak_bytes(trace_plan(made.task, made.optimizer, plan, like).program)


def _costs(program: Program, plan: Plan) -> Costs:
    schedule = make_schedule(plan.schedule, plan.pipeline, plan.microbatches, plan.virtual_stages)
    planned = program.planned_collectives() if program.members is None else None
    return Costs.of(schedule, planned or program.collectives(), program.memory())


def _compared(
    made: experiment.Experiment, options: Show, plan: Plan, own: Costs
) -> dict[str, Costs | str]:
    """Return the costs of each named schedule and of the plan's, or why it cannot run."""
    compared: dict[str, Costs | str] = {}
    names: tuple[ScheduleName, ...] = get_args(ScheduleName)
    for name in names:
        if name == plan.schedule:
            compared[name] = own
            continue
        try:
            # The default number of stages per device depends on the schedule.
            other = dataclasses.replace(plan, schedule=name, stages=None)
            compared[name] = _costs(_program(made, options, other), other)
        except errors.PlanError as error:
            compared[name] = str(error)
    return {**compared, own.schedule.name: own}


def _verify(arguments: list[str]) -> int:
    made, options, _ = parse(arguments, "verify", verify_options)
    if options.members.chosen(made.members) is not None or not isinstance(made.task, Task):
        raise errors.verify_one_network()
    _, like = _source(made, options)
    batch = next(chunks(made.data, leading_dim(like)))
    result = verify(
        made.task, made.optimizer, options.chosen_plan(), batch,
        steps=options.steps, seed=options.seed,
    )  # fmt: skip
    Console(highlight=False, soft_wrap=True).print(str(result), markup=False)
    return 0 if result.ok else 1


def _estimate(arguments: list[str]) -> int:
    made, options, _ = parse(arguments, "estimate", estimate_options)
    task, machine, like = _to_estimate(made, options, "estimate")
    found = estimate(task, made.optimizer, options.chosen_plan(), like, machine)
    print(found)
    if options.examples is not None:
        takes = human_seconds(found.seconds_for(options.examples))
        hours = found.device_hours(options.examples)
        print(f"{options.examples:,.0f} examples take {takes}: {hours:,.3g} device-hours")
    return 0


def _diff(arguments: list[str]) -> int:
    """Compare two plans, given as files in front of the other options."""
    file = value(arguments, "--diff")
    place = next(i for i, one in enumerate(arguments) if one.split("=")[0] == "--diff")
    rest = arguments[:place] + arguments[place + (1 if "=" in arguments[place] else 2) :]
    paths = list(itertools.takewhile(lambda one: not one.startswith("-"), rest))
    asked_help = bool({"-h", "--help"} & {*rest})
    if not file or (len(paths) != 2 and not asked_help):
        raise errors.diff_needs_two_plans(arguments)
    plans = {path: Plan.load(path) for path in paths}
    made, options, _ = parse([file, *rest[len(paths) :]], "plan A B --diff", diff_options)
    task, machine, like = _to_estimate(made, options, "plan --diff")
    found = {}
    for path, plan in plans.items():
        try:
            found[path] = estimate(task, made.optimizer, plan, like, machine)
        except errors.PlanError as error:
            raise errors.plan_in_a_file(path, error) from None
    print(Comparison(found[paths[0]], found[paths[1]], (paths[0], paths[1])))
    return 0


def _to_estimate(
    made: experiment.Experiment, options: EstimateOptions | DiffOptions | Show, command: str
) -> tuple[Task, Machine, PyTree]:
    """Return the task, the machine of the options, and the shapes of a batch."""
    if options.members.chosen(made.members) is not None or not isinstance(made.task, Task):
        raise errors.estimate_one_network(command)
    machine = machine_named(options.machine, options.nodes)
    return made.task, machine, _source(made, options)[1]


def _trained(
    made: experiment.Experiment, options: Common, plan: Plan, members: Members | None
) -> dict[str, Any]:
    """Return the arguments that `fit` and `tune` share."""
    return {
        "task": made.task,
        "optimizer": made.optimizer,
        "data": made.data,
        "plan": plan,
        "members": members,
        "batch_size": options.batch_size,
        "shuffle": made.shuffle,
    }


def _source(made: experiment.Experiment, options: Common) -> tuple[Data, PyTree]:
    """Return the data, and the shapes of a full batch."""
    return as_data(
        made.data,
        batch_size=options.batch_size,
        seed=made.seed,
        shuffle=made.shuffle,
        ragged=made.ragged,
    )


def _program(made: experiment.Experiment, options: Common, plan: Plan) -> Program:
    """Return the program to show or to predict with."""
    members = options.members.chosen(made.members)
    source, like = _source(made, options)
    if members is not None:
        source = with_resampling(members, source)
    return make_program(made.task, made.optimizer, plan, like, members, source, None, None)


def _read_arrays(path: Path) -> Any:
    if not path.is_file():
        raise errors.inputs_not_found(str(path))
    try:
        loaded = np.load(path, allow_pickle=False)
        return loaded if isinstance(loaded, np.ndarray) else dict(loaded)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise errors.inputs_not_arrays(str(path), str(error)) from None


def _written(path: Path, write: Callable[[Path], T]) -> T:
    """Return `write(path)`; of several processes one writes, the others to nowhere.

    Raises `ExperimentError` where the file cannot be written.
    """
    if not writes_files():
        with tempfile.TemporaryDirectory() as elsewhere:
            return write(Path(elsewhere, path.name))
    try:
        return write(path)
    except (OSError, ValueError) as error:
        raise errors.not_written(str(path), str(error)) from None


def _write_arrays(path: Path, outputs: Any) -> Path:
    one = isinstance(outputs, np.ndarray)
    stem = path.stem if path.suffix in (".npy", ".npz") else path.name
    path = path.with_name(stem + (".npy" if one else ".npz"))
    if one:
        np.save(path, outputs, allow_pickle=False)
        return path
    # Written by hand because `np.savez` accepts no array named `file`.
    with zipfile.ZipFile(path, "w") as archive:
        for name, leaf in tree.named_leaves(outputs).items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, leaf, allow_pickle=False)
    return path


def _of_numpy(array: np.ndarray) -> np.ndarray:
    """Cast to a dtype that NumPy can load: bfloat16 and the like to float32."""
    if array.dtype.kind != "V":
        return array
    return array.astype(np.float32 if jnp.issubdtype(array.dtype, jnp.inexact) else np.int32)
