"""The commands: one line each. Nothing that a command needs is imported before it is chosen."""

import dataclasses
import importlib
from collections.abc import Callable

from plurax import __version__
from plurax.exit_codes import ADVICE, MEANINGS, meaning


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: how it is written, a line of help, and the function that runs it."""

    usage: str
    """The name, and what stands after it."""
    group: str
    """The heading under which the help shows it."""
    help: str
    """What it does, as a sentence without a capital and a full stop."""
    function: str
    """`module:function` in `plurax.cli`; the function takes arguments and returns an exit code."""
    options: str
    """`module:name` of its options: a dataclass, or a function that returns one."""
    gangs: bool = False
    """Whether several processes can run it together, under `plurax launch`."""

    @property
    def name(self) -> str:
        """The first word."""
        return self.usage.split()[0]

    def load(self) -> Callable[[list[str]], int]:
        """Import the function."""
        module, _, name = self.function.partition(":")
        function: Callable[[list[str]], int] = getattr(
            importlib.import_module(f"plurax.cli.{module}"), name
        )
        return function


START, TRAIN, RUNS = "Begin", "Train and predict", "Finished and running runs"
PLANS, HERE = "Plans and machines", "This installation"

COMMANDS = (
    Command("new FILE", START, "write an experiment that runs, to put your own into",
            "example_commands:new_command", "example_commands:NewOptions"),
    Command("examples [NAME]", START, "list the examples, or write one here",
            "example_commands:examples_command", "example_commands:ExamplesOptions"),
    Command("train FILE", TRAIN, "train the experiment that FILE defines",
            "train_command:train_experiment", "options:train_class", gangs=True),
    Command("predict FILE", TRAIN, "run its trained network over inputs of any number",
            "predict_command:predict_command", "predict_command:Predict", gangs=True),
    Command("launch -- ...", TRAIN, "train by several processes, and again after a fault",
            "launch_command:launch_command", "launch_command:LaunchOptions"),
    Command("watch RUN", RUNS, "show a run in the terminal while it goes on",
            "watch_command:watch_command", "watch_command:WatchOptions"),
    Command("report RUN ...", RUNS,
            "write runs as one HTML page: curves, sweeps, plans, estimates, events",
            "report_command:report_command", "report_command:ReportOptions"),
    Command("replay RUN", RUNS,
            "repeat a run with parameter servers from its record, and compare",
            "replay_command:replay_command", "replay_command:ReplayOptions", gangs=True),
    Command("plan FILE", PLANS, "show what a plan does on a machine, before anything runs",
            "plan_command:plan_command", "options:Show", gangs=True),
    Command("estimate FILE", PLANS,
            "say how long a step takes on a machine, and what it holds and sends",
            "estimate_command:estimate_command", "estimate_command:EstimateOptions", gangs=True),
    Command("verify FILE", PLANS, "check that a plan computes what one device computes",
            "verify_command:verify_command", "verify_command:Verify", gangs=True),
    Command("machine", PLANS,
            "print a machine's rates, memory and links: this one's, or published ones",
            "machine_command:machine_command", "machine_command:MachineOptions", gangs=True),
    Command("doctor", HERE, "print devices, versions and what is slow, for a bug report",
            "doctor_command:doctor_command", "doctor_command:DoctorOptions"),
    Command("completion SHELL", HERE, "print a script with which bash, zsh or fish completes it",
            "completion_command:completion_command", "completion_command:CompletionOptions"),
)  # fmt: skip
"""In the order of the help. A new command is a line here."""


def command_named(name: str) -> Command | None:
    """Return the command of a name, or None."""
    return next((command for command in COMMANDS if command.name == name), None)


def help_text() -> str:
    """Return the help of `plurax`: the commands in groups."""
    width = max(len(command.usage) for command in COMMANDS)
    lines = [f"plurax {__version__}: train neural networks in parallel on JAX"]
    for group in dict.fromkeys(command.group for command in COMMANDS):
        lines += ["", f"{group}:"]
        lines += [
            f"  plurax {command.usage:<{width}}  {command.help}"
            for command in COMMANDS
            if command.group == group
        ]
    return "\n".join([*lines, "", FOOT])


FOOT = """\
FILE is a Python file that defines experiment(), which returns plurax.Experiment(...); in its place
may stand RUN, the folder of a run, which remembers its FILE, options and plan.
Plan, epochs, batch size, seed and more can be overridden:

  plurax train digits.py --epochs 3 --plan.data 4 --devices 4

plurax COMMAND FILE --help lists the options needed most with the file's own defaults, --help-all
all of them, and plurax help exit-codes the exit codes.
"""


def exit_codes_text() -> str:
    """Return the exit codes, each with its meaning and what to do."""
    lines = ["Exit codes of plurax:", ""]
    for code, text in MEANINGS.items():
        lines.append(f"  {code:>3}  {text}")
        lines += [f"       {ADVICE[code]}"] if code in ADVICE else []
    return "\n".join([*lines, "", f"Another above 128 is a signal: {meaning(139)} is 139.", ""])
