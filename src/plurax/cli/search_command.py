"""`plurax plan --search`: rank plans for a machine; `--longest`: the longest sequences that fit."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from plurax import errors
from plurax.cli.chosen import data_source, written
from plurax.cli.compile_for import print_compiled
from plurax.cli.machine_command import machine_named
from plurax.cli.options import Show
from plurax.console import PlainConsole
from plurax.experiment import Experiment
from plurax.plan import Plan
from plurax.planner.effort import EVALUATIONS
from plurax.planner.longest import TriedLength, longest
from plurax.planner.search import search
from plurax.report.layer_picture import draw_found
from plurax.report.picture import check_matplotlib
from plurax.targets import Target
from plurax.task import Task

_COMPILED = 3
"""Of the found plans, those that --compile-for compiles."""


def search_command(experiment: Experiment, options: Show, plan: Plan, arguments: list[str]) -> int:
    """Rank plans, and write the best one where asked."""
    if options.output is not None:
        check_matplotlib()
    if options.machine is None and options.compile_for is not None:
        machine = Target.of(options.compile_for).machine
    else:
        machine = machine_named(options.machine, options.nodes)
    members = options.members.chosen(experiment.members)
    _, batch = data_source(experiment, options, members)
    with PlainConsole(stderr=True).status("searching"):
        result = search(
            experiment.task,
            experiment.optimizer,
            batch,
            machine,
            members=members,
            pinned=plan if options.plan_file else _given(plan, arguments),
            **_effort(options),
        )
    print(result)
    if options.compile_for is not None:
        print()
        first = [result.plan(rank) for rank in range(1, len(result.ranked[:_COMPILED]) + 1)]
        print_compiled(experiment, options, first, options.compile_for)
    if options.save is not None:
        with PlainConsole(stderr=True).status("leaving out what the default does as well"):
            best = result.best
        written(options.save, best.save)
        print(f"wrote {options.save}")
    if options.output is not None:
        for path in written(options.output, lambda path: draw_found(result, path)):
            print(f"wrote {path}")
    return 0


def longest_command(experiment: Experiment, options: Show, plan: Plan, arguments: list[str]) -> int:
    """Print the longest sequences that fit, and write the plan for them where asked."""
    for name in ("tune", "compare", "compile_for", "output"):
        if getattr(options, name):
            raise errors.PlanError(
                f"--longest estimates, and --{name.replace('_', '-')} is of a batch as it is. "
                "Leave one of them out."
            )
    task = experiment.task
    if options.members.chosen(experiment.members) is not None or not isinstance(task, Task):
        raise errors.MembersError("--longest is for one network, and the experiment has members.")
    _, batch = data_source(experiment, options)
    machine = machine_named(options.machine, options.nodes)
    pinned = plan if options.plan_file else _given(plan, arguments)
    by: dict[str, Any] = {"pinned": pinned} if options.search else {"plan": plan}
    with PlainConsole(stderr=True).status("estimating lengths") as status:

        def show(tried: TriedLength) -> None:
            fits = "does not fit" if tried.why else "fits"
            status.update(f"{tried.length:,} {fits}, estimating others")

        optimizer, effort = experiment.optimizer, _effort(options)
        result = longest(task, optimizer, batch, machine, progress=show, **by, **effort)
    print(result)
    if options.save is not None:
        written(options.save, result.plan.save)
        print(f"wrote {options.save}")
    return 0


def _effort(options: Show) -> dict[str, Any]:
    evaluations = EVALUATIONS if options.evaluations is None else options.evaluations
    return {"memory": options.memory, "evaluations": evaluations, "seconds": options.seconds}


def _given(plan: Plan, arguments: Sequence[str]) -> dict[str, Any]:
    """Return what the command line says of a plan, and the precision, which changes the numbers."""
    options = (argument.removeprefix("--plan.").split("=")[0] for argument in arguments)
    named = {option.replace("-", "_") for option in options}
    fields = [field.name for field in dataclasses.fields(Plan)]
    kept = [name for name in fields if name in named or name == "precision"]
    return {name: getattr(plan, name) for name in kept}
