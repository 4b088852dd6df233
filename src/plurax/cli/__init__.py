"""The command line."""

from plurax.cli.commands import main as main
