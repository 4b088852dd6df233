"""`plurax plan`: show what a plan does, compiled on the devices of this machine."""

import dataclasses
from pathlib import Path
from typing import get_args

from plurax import errors, tree
from plurax.analysis.compiled_figures import figures_text
from plurax.analysis.estimate import Estimate
from plurax.analysis.measured import Measured
from plurax.cli.chosen import chosen_program, data_source, written
from plurax.cli.compile_for import print_compiled
from plurax.cli.estimate_command import ToEstimate, diff_command
from plurax.cli.options import Show
from plurax.cli.parse import parse
from plurax.cli.search_command import longest_command, search_command
from plurax.console import PlainConsole
from plurax.distributed.global_arrays import described_devices
from plurax.execute.program import Program
from plurax.execute.recorder import record_step
from plurax.experiment import Experiment
from plurax.pipeline.schedule import make_schedule
from plurax.plan import Plan, ScheduleName
from plurax.report.picture import check_matplotlib
from plurax.report.plan_picture import draw_plan
from plurax.report.plan_tables import compared_table, plan_report, shards_table
from plurax.report.timeline import ScheduleCosts, compared_schedules_table, timeline_report
from plurax.run_folder.run_file import read_run_file
from plurax.task import Task
from plurax.trace.liveness import peak_bytes
from plurax.train.tune import tune

TABLE_WIDTH, TIMELINE_WIDTH = 160, 100


def plan_command(arguments: list[str]) -> int:
    """Show a plan, or search for one, or compare two."""
    if any(record.split("=")[0] == "--diff" for record in arguments):
        return diff_command(arguments)
    experiment, options, *_ = parse(arguments, "plan", Show)
    plan = options.chosen_plan()
    if options.longest:
        return longest_command(experiment, options, plan, arguments)
    if options.search:
        return search_command(experiment, options, plan, arguments)
    _check_shown(options, plan)
    if options.compile_for is not None:
        return print_compiled(experiment, options, [plan], options.compile_for)
    if options.tune is not None:
        plan = _tuned(experiment, options, plan, options.tune)
    predicted = _estimated(experiment, options, plan)
    program = chosen_program(experiment, options, plan)
    params = program.canonical_shapes.params
    memory, compiled = program.memory(), program.collectives()
    console, columns = _console()
    planned = program.planned_collectives() if program.members is None else []
    console.print(
        plan_report(
            program.plan,
            program.batch_size,
            described_devices(program.mesh.devices.flat),
            tree.parameter_count(params),
            tree.byte_count(params),
            memory,
            compared_table(planned, compiled) if planned else None,
            compiled,
            _predicted_peak(experiment, options, program, predicted),
        ),
        *_trained(arguments[0]),
        sep="\n",
    )
    if predicted is not None:
        beside = Measured.of(predicted, program.compiled, program.mesh)
        console.print(f"\n{beside}")
    pipeline = _costs(program, plan) if plan.pipeline > 1 else None
    compared = None
    if pipeline is not None:
        console.print("", timeline_report(pipeline, columns))
    if pipeline is not None and options.compare:
        with console.status("compiling under the other schedules"):
            compared = _compared(experiment, options, plan, pipeline)
        console.print("", compared_schedules_table(compared, pipeline.schedule.name))
    if program.members is not None:
        return 0
    if planned:
        console.print("", shards_table(program.shardings))
    if options.save is not None:
        known = all(record.trips is not None for record in compiled)
        drawn = (program.shardings, memory, compiled if known or not planned else planned)
        title = f"{Path(arguments[0]).stem}, {plan.sizes_text()}"
        path = _with_ending(options.save)
        written(
            path, lambda path: draw_plan(title, *drawn, path, pipeline, compared, plan.strategies)
        )
        console.print(f"wrote {path}")
    return 0


def _console() -> tuple[PlainConsole, int]:
    """Return where tables are printed, and how wide a timeline is there."""
    console = PlainConsole()
    columns = console.width if console.is_terminal else TIMELINE_WIDTH
    # A truncated table is useless; a wrapped line can still be read.
    console.width = max(console.width, TABLE_WIDTH)
    return console, columns


def _trained(path: str) -> list[str]:
    """Return a line on what was compiled when a run was trained, if `path` is its folder."""
    run = read_run_file(path) if Path(path).is_dir() else None
    text = "" if run is None else figures_text(run.compiled)
    return [f"\nwhen {path} was trained: {text}"] if text else []


def _check_shown(options: Show, plan: Plan) -> None:
    """Check the options with which a plan is shown, before anything is compiled."""
    for name in ("memory", "evaluations", "seconds", "output"):
        if getattr(options, name) is not None:
            raise errors.PlanError(
                f"--{name} is an option of a search, and `plurax plan` shows the plan as it is: "
                f"add --search, or leave --{name} out."
            )
    if options.save is not None:
        check_matplotlib()
        if options.save.suffix == ".toml":
            raise errors.PlanError(
                f"--save draws the plan, and {options.save} is no picture: write --save plan.png, "
                "or add --search, which saves the plan that it finds."
            )
    if options.save is not None and options.compile_for is not None:
        raise errors.PlanError(
            "--save draws the plan as compiled for the devices that are here, and --compile-for "
            "names devices that are not. Leave one of them out."
        )
    if options.compare and plan.pipeline == 1:
        raise errors.PlanError(
            "--compare compares the schedules of a pipeline, and the plan has pipeline=1: add "
            "--plan.pipeline 4 --plan.microbatches 8, for example, or leave --compare out."
        )


def _with_ending(path: Path) -> Path:
    """Return the path of a picture; Matplotlib adds the same ending."""
    return path if path.suffix else path.with_name(f"{path.name}.png")


def _tuned(experiment: Experiment, options: Show, plan: Plan, path: Path) -> Plan:
    """Measure the open choices of a plan, write the plan to a file, and return it."""
    members = options.members.chosen(experiment.members)
    if members is None:
        raise errors.MembersError(
            "--tune measures the chunk and the batch_dim of a population, and this is one network, "
            "which has neither. Say how many members there are: --members.seeds 100."
        )
    tuning = tune(
        experiment.task, experiment.optimizer, experiment.data, plan=plan, members=members,
        batch_size=options.batch_size, shuffle=experiment.shuffle,
    )  # fmt: skip
    print(tuning)  # print first: measuring may have taken minutes, and writing may fail
    written(path, tuning.plan.save)
    print(f"wrote {path}")
    return tuning.plan


def _estimated(experiment: Experiment, options: Show, plan: Plan) -> Estimate | None:
    """Return the estimate of a plan on the machine that is named, if one is."""
    if options.machine is None and options.nodes == 1:
        return None
    return ToEstimate.of(experiment, options).estimate(plan)


def _predicted_peak(
    experiment: Experiment, options: Show, program: Program, predicted: Estimate | None
) -> int | None:
    if program.members is not None:
        return None
    if predicted is not None:
        return predicted.peak
    assert isinstance(experiment.task, Task)
    _, like = data_source(experiment, options)
    platform = program.mesh.devices.flat[0].platform
    trace = record_step(experiment.task, experiment.optimizer, program.plan, like, platform)
    return peak_bytes(trace, platform)


def _costs(program: Program, plan: Plan) -> ScheduleCosts:
    schedule = make_schedule(
        plan.schedule, plan.pipeline, plan.most_microbatches, plan.virtual_stages
    )
    planned = program.planned_collectives() if program.members is None else None
    return ScheduleCosts.of(schedule, planned or program.collectives(), program.memory())


def _compared(
    experiment: Experiment, options: Show, plan: Plan, own: ScheduleCosts
) -> dict[str, ScheduleCosts | str]:
    """Return the costs of each named schedule and of the plan's, or why it cannot run."""
    compared: dict[str, ScheduleCosts | str] = {}
    names: tuple[ScheduleName, ...] = get_args(ScheduleName)
    for name in names:
        if name == plan.schedule:
            compared[name] = own
            continue
        try:
            # The default number of stages per device depends on the schedule.
            other = dataclasses.replace(plan, schedule=name, stages=None)
            compared[name] = _costs(chosen_program(experiment, options, other), other)
        except errors.PlanError as error:
            compared[name] = str(error)
    return {**compared, own.schedule.name: own}
