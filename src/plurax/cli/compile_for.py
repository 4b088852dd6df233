"""`plurax plan --compile-for`: what the compiler of another machine makes of plans."""

from collections.abc import Sequence

from plurax import errors
from plurax.analysis.compiled_step import compiled_for
from plurax.cli.chosen import data_source
from plurax.cli.options import Show
from plurax.console import PlainConsole
from plurax.experiment import Experiment
from plurax.plan import Plan


def print_compiled(
    experiment: Experiment, options: Show, plans: Sequence[Plan], machine: str
) -> int:
    """Print what the compiler of a machine makes of some plans, each once it is compiled."""
    for option in ("tune", "compare"):
        if getattr(options, option):
            raise errors.PlanError(
                f"--{option} measures or compares on the devices that are here, and --compile-for "
                "names devices that are not. Leave one of them out."
            )
    if options.machine is not None and not options.search:
        raise errors.PlanError(
            f"--machine names the machine of an estimate, and --compile-for {machine} has its own. "
            "Leave --machine out."
        )
    members = options.members.chosen(experiment.members)
    _, batch = data_source(experiment, options, members)
    for index, plan in enumerate(plans):
        with PlainConsole(stderr=True).status(f"compiling Plan({plan.sizes_text()}) for {machine}"):
            result = compiled_for(
                experiment.task, experiment.optimizer, plan, batch, machine, members=members,
                compiler_options=experiment.compiler_options,
            )  # fmt: skip
        print(f"\n{result}" if index else result)
    return 0
