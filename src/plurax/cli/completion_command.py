"""`plurax completion`: a script with which a shell completes commands and options."""

import contextlib
import dataclasses
import importlib
import io
from pathlib import Path
from typing import Any, Literal

import tyro

from plurax.cli.commands import COMMANDS, Command
from plurax.cli.parser import option_rules, parse_options


@dataclasses.dataclass(frozen=True)
class CompletionOptions:
    """Print a script with which a shell completes plurax.

    bash: plurax completion bash > ~/.local/share/bash-completion/completions/plurax;
    zsh: plurax completion zsh > a file _plurax in a folder of $fpath;
    fish: plurax completion fish > ~/.config/fish/completions/plurax.fish.
    """

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell."""


def completion_command(arguments: list[str]) -> int:
    """Print the script; it is tyro's, of all commands with their options."""
    options = parse_options(CompletionOptions, "plurax completion", arguments)
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        tyro.extras.subcommand_cli_from_dict(
            {command.name: options_of(command) for command in COMMANDS},
            prog="plurax",
            args=["--tyro-print-completion", options.shell],
            registry=option_rules(),
        )
    # tyro's scripts for bash and fish complete no names of files, and FILE is one.
    text = script.getvalue().replace("complete -F ", "complete -o bashdefault -o default -F ")
    print(text.replace("complete --no-files ", "complete "))
    return 0


def options_of(command: Command) -> Any:
    """Return the options of a command as a dataclass, with FILE where it has one."""
    module, _, name = command.options.partition(":")
    options = getattr(importlib.import_module(f"plurax.cli.{module}"), name)
    kind = options if isinstance(options, type) else options()
    if "FILE" not in command.usage:
        return kind
    file: Any = ("file", tyro.conf.Positional[Path], Path("FILE"))
    with_file = dataclasses.make_dataclass(kind.__name__, [file], bases=(kind,), frozen=True)
    with_file.__doc__ = kind.__doc__
    return with_file
