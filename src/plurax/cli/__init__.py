"""The command line."""

import importlib
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `plurax`. Exits with 2 after a user's error."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # A launcher starts in a tenth of a second without JAX, and is small beside its processes.
    module = "launch_command" if arguments[:1] == ["launch"] else "dispatch"
    importlib.import_module(f"plurax.cli.{module}").main(arguments)
